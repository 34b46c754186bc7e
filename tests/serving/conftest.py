"""What tests of serving share: the packaged model, and requests in short."""

from collections.abc import Callable
from pathlib import Path

import pytest

from serving import (
    PACKAGED_MODEL,
    EngineConfigError,
    ModelTemplate,
    PromptParts,
    Request,
    Sampling,
    TokenPrompt,
    load_template,
    resolve,
)

MakeRequest = Callable[..., Request]


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The packaged model; the first use on a machine converts it, which takes a minute."""
    try:
        return resolve(PACKAGED_MODEL).directory
    except EngineConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def template(model_directory: Path) -> ModelTemplate:
    return load_template(model_directory)


@pytest.fixture
def make_request() -> MakeRequest:
    def make(
        number: int = 0,
        *,
        ids: tuple[int, ...] = tuple(range(100)),
        choices: tuple[str, ...] | None = ("e2e4", "d2d4", "g1f3"),
        match_id: str = "m",
        seed: int | None = 1,
        deadline_s: float = 30.0,
        max_tokens: int = 6,
        stream: bool = False,
    ) -> Request:
        return Request(
            id=f"{match_id}/{number}/0/0",
            match_id=match_id,
            prompt=TokenPrompt(ids),
            choices=choices,
            max_tokens=max_tokens,
            sampling=Sampling(seed=seed),
            deadline_s=deadline_s,
            stream=stream,
        )

    return make


@pytest.fixture
def parts() -> PromptParts:
    return PromptParts("You play chess. Answer with a move.", "", "Moves so far:", ("e2e4", "e7e5"))
