"""One declaration per setting: a field of a frozen dataclass holds its name, type, default, range and meaning.

    max_steps: Annotated[int, Meta(ge=1, description="optimizer steps")] = 300

Everything else is derived from such records: checks of values (`check`), TOML files and `--set` (`Given`, `build`), the
commented file (`template`), flags (`add_flags`) and keyword arguments (`keywords_of`, `signature_of`). The tables in
the docs and the types of keyword arguments are made by `scripts/make_settings.py`. Nothing else lists a setting.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
