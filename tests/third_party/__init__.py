"""Published models that nobody here wrote; skipped where they are not installed."""
