"""Paths and shapes of small models of each family, in each spelling.

Each module has `SPELLINGS`: name of the spelling → (path → shape), by functions of our
own that follow the published definitions. `tests/third_party/test_presets.py` compares
them with the libraries, where these are installed.
"""
