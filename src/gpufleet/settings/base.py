"""Settings that must match a pattern, which is compiled when the first of them is checked.  Pure.

`Field(pattern=...)` compiles when the class is made. A class of every Unicode letter takes up to
5 ms, all patterns of our settings 17 ms of each start, and variables name few of those settings.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticKnownError, SchemaValidator, core_schema


class Matches:
    """
    Beside a text's type in `Annotated`: what it must match, as `Field(pattern=...)` has it.

    The same engine judges and the same sentence refuses; null is let through where it is allowed.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Tell pydantic how such a value is validated."""
        schema = handler(source)
        if schema["type"] == "nullable":
            return core_schema.nullable_schema(self._checked(schema["schema"]))
        return self._checked(schema)

    def _checked(self, schema: core_schema.CoreSchema) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, schema)

    def _check(self, text: str) -> str:
        if not self._compiled.isinstance_python(text):
            raise PydanticKnownError("string_pattern_mismatch", {"pattern": self.pattern})
        return text

    @cached_property
    def _compiled(self) -> SchemaValidator:
        return SchemaValidator(core_schema.str_schema(pattern=self.pattern))
