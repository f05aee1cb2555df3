"""Gemma 1 and Gemma 2 2B in the package `gemma`: gate and up are (2, model, hidden)."""

from presets.models.gemma import einsums, of, without_groups

SPELLINGS = {
    "gemma, 1": of(einsums("gemma", 1, transposed=False)),
    "gemma, 1, without groups": of(
        without_groups(einsums("gemma", 1, transposed=False))
    ),
    "gemma, 2": of(einsums("gemma", 2, transposed=False)),
}
