"""Integer operations of vector instructions that numpy does not have as such. Values are uint32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emulator.floats import Value


def shift(by: Callable[[Value, Value], Value], largest: int) -> Callable[[Value, Value], Value]:
    """A shift that looks at the lowest bits of its amount only."""
    return lambda value, amount: by(value, np.bitwise_and(amount, largest).astype(value.dtype))


_left, _right = shift(np.left_shift, 31), shift(np.right_shift, 31)


def unsigned_24(value: Value) -> Value:
    return np.bitwise_and(value, np.uint32(0xFFFFFF))


def signed_24(value: Value) -> Value:
    return np.right_shift(np.left_shift(np.asarray(value, np.uint32), np.uint32(8)).view(np.int32), np.int32(8))


def multiply_high(a: Value, b: Value) -> Value:
    return np.right_shift(np.multiply(a, b, dtype=np.uint64), np.uint64(32)).astype(np.uint32)


def reverse_bits(value: Value) -> Value:
    """Bit 31 becomes bit 0."""
    for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        low = np.bitwise_and(value, np.uint32(mask))
        high = np.bitwise_and(np.right_shift(value, np.uint32(step)), np.uint32(mask))
        value = np.bitwise_or(np.left_shift(low, np.uint32(step)), high)
    return value


def mask_bits(width: Value) -> Value:
    """As many ones as the lowest five bits of ``width`` say."""
    return np.subtract(_left(np.uint32(1), width), np.uint32(1))


def bit_field(value: Value, begin: Value, width: Value) -> Value:
    return np.bitwise_and(_right(value, begin), mask_bits(width))


def signed_bit_field(value: Value, begin: Value, width: Value) -> Value:
    field, nbits = bit_field(value, begin, width), np.bitwise_and(width, 31)
    sign = np.where(nbits == 0, np.uint32(0), _left(np.uint32(1), np.subtract(nbits, np.uint32(1))))
    return np.subtract(np.bitwise_xor(field, sign), sign)


def insert_bits(mask: Value, inserted: Value, base: Value) -> Value:
    return np.bitwise_or(np.bitwise_and(mask, inserted), np.bitwise_and(np.invert(mask), base))


def align_bits(high: Value, low: Value, amount: Value) -> Value:
    """32 bits out of the 64 of both."""
    both = np.bitwise_or(np.left_shift(high, np.uint64(32), dtype=np.uint64), low)
    return np.right_shift(both, np.bitwise_and(amount, 31).astype(np.uint64)).astype(np.uint32)


def permute_bytes(high: Value, low: Value, selector: Value) -> Value:
    """Each byte of the selector picks one of the eight bytes, a sign, or a constant (V_PERM_B32)."""
    both = np.bitwise_or(np.left_shift(high, np.uint64(32), dtype=np.uint64), low)
    result: Value = np.uint32(0)
    for number in range(4):
        pick = np.bitwise_and(np.right_shift(selector, np.uint32(8 * number)), np.uint32(0xFF)).astype(np.uint64)
        byte = np.right_shift(both, np.minimum(pick, 7) * np.uint64(8)) & np.uint64(0xFF)
        # 8 to 11: the sign of byte 1, 3, 5 or 7, eight times; 12: zeros; above: ones.
        sign_at = np.minimum(np.maximum(pick, np.uint64(8)) - np.uint64(8), np.uint64(3)) * np.uint64(16) + np.uint64(
            15
        )
        sign = (np.right_shift(both, sign_at) & np.uint64(1)) * np.uint64(0xFF)
        chosen = np.select([pick < 8, pick < 12, pick == 12], [byte, sign, np.uint64(0)], np.uint64(0xFF))
        result = np.bitwise_or(result, np.left_shift(chosen.astype(np.uint32), np.uint32(8 * number)))
    return result
