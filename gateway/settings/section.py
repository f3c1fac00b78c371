"""What all sections of the configuration share."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # there may be secrets
