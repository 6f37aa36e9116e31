"""The base class of all groups of settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Group(BaseModel):
    """Keys that belong together; subclasses are immutable and refuse unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _text(cls, given: Any) -> Any:
        """Convert numbers given for text keys: ``--set data-dir=2024`` is parsed as a number."""
        texts = {name for name, field in cls.model_fields.items() if field.annotation is str}
        texts |= {str(cls.model_fields[name].alias) for name in texts}
        return {
            key: str(value)
            if key in texts and isinstance(value, int | float) and not isinstance(value, bool)
            else value
            for key, value in dict(given).items()
        }

    @classmethod
    def key_names(cls) -> list[str]:
        """Return the kebab-case keys of this group."""
        return [name.replace("_", "-") for name in cls.model_fields]
