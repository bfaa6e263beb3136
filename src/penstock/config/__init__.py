"""One declaration per setting: a field of a frozen dataclass says its name, type, default, range and meaning.

    max_steps: Annotated[int, Meta(ge=1, description="optimizer steps")] = 300

From such records are made: the check of every value (`check`), the reader of TOML files and of `--set` (`Given`,
`build`), the commented file (`template`), flags (`add_flags`), keyword arguments (`keywords_of`, `signature_of`) and
the tables of the docs (`docs_table`). Nothing else lists a setting.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
