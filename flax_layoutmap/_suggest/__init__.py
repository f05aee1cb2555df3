"""Suggested rules: `flm.suggest`."""
