"""One tour through the verbs for all tests here that look at what it left."""

from __future__ import annotations

import pytest

from verb_tour import Tour


@pytest.fixture(scope="session")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Tour:
    made = Tour(tmp_path_factory.mktemp("tour"))
    with made.watch_commands():
        made.make()
    return made
