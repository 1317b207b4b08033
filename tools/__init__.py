"""Command lines over the store: kvctl and the demo."""
