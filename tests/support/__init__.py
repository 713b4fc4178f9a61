"""Helpers that several kinds of tests share: caches on the stand-in device, and what a transfer must do, in numpy."""
