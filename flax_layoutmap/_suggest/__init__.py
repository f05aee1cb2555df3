"""Rules that are found by search: `flm.suggest`."""
