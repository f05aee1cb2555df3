"""Let Griffe read `Example:` in a docstring as its section `Examples:`."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """The same section, whether its title is in the singular or in the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the title before the docstring is read."""
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(
                "Examples:" if line == "Example:" else line for line in lines
            )
