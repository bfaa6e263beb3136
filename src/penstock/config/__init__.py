"""One declaration per setting: a field of a frozen dataclass says its name, type, default, range and meaning.

    max_steps: Annotated[int, Meta(ge=1, description="optimizer steps")] = 300

From such records are made: the check of every value (`check`), the reader of TOML files and of `--set` (`Given`,
`build`), the commented file (`template`), flags (`add_flags`), keyword arguments (`keywords_of`, `signature_of`) and
the tables of the docs (`docs_table`). Nothing else lists a setting.
"""

from penstock.config.build import build
from penstock.config.docs_table import docs_table, kinds_table
from penstock.config.flags import add_flags, read_flags
from penstock.config.given import COMMAND_LINE, Given
from penstock.config.keywords import Keyword, keywords_of, nested, signature_of, typed_dict
from penstock.config.setting import Checked, Kinds, Setting, check, settings_of
from penstock.config.template import template

__all__ = [
    "COMMAND_LINE",
    "Checked",
    "Given",
    "Keyword",
    "Kinds",
    "Setting",
    "add_flags",
    "build",
    "check",
    "docs_table",
    "keywords_of",
    "kinds_table",
    "nested",
    "read_flags",
    "settings_of",
    "signature_of",
    "template",
    "typed_dict",
]
