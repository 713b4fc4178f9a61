"""Own page-locked host memory and move KV-cache pages between it and GPUs."""

from kvferry.hostpool.device_pool import DevicePool
from kvferry.hostpool.layout import Component, KVLayout
from kvferry.hostpool.pool import HostPool
from kvferry.hostpool.ticket import Ticket

__all__ = ["Component", "DevicePool", "HostPool", "KVLayout", "Ticket"]
