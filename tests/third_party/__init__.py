"""Published third-party models; skipped where they are not installed."""
