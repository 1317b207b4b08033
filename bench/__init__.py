"""Harnesses and reports: cache hits on traces, speed."""
