"""What many bodies and paths of the control plane have: bodies that take no unknown field, and shared fields."""

from typing import Annotated, Final

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A body with the fields that it has, and no other."""

    model_config = ConfigDict(extra="forbid")


Next = Annotated[str | None, Field(description="the `cursor` of the page after this one; null: this is the last")]
RulesRevision = Annotated[int, Field(description="of the rules")]

PAGE_SIZE: Final = "at most so many"
ModelPath = Annotated[str, Path(description="the model's name")]
DeployPath = Annotated[str, Path(description="the deploy's id")]
KeyPath = Annotated[str, Path(description="the key's id")]
RolloutPath = Annotated[str, Path(description="the rollout's id")]
