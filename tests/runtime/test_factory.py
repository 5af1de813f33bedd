"""A mode is the built-in runtime, a plug-in's, or one sentence that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbp.errors import ConfigError, SegmentError
from umbp.options import MODES, Options, parse_options
from umbp.runtime.base import Capabilities, capabilities_of
from umbp.runtime.embedded import EmbeddedRuntime
from umbp.runtime.factory import create_runtime
from umbp.runtime.null import NullRuntime
from umbp.testing.plugins import write_plug_in

PLUG_IN_CODE = """
from umbp.errors import SegmentError
from umbp.runtime.null import NullRuntime
made = []
def make(options):
    made.append(options)
    return NullRuntime()
def falls(options):
    raise ZeroDivisionError("oh")
def refuses(options):
    raise SegmentError("no pool today")
def answers_nothing(options):
    return None
def boasts(options):
    runtime = NullRuntime()
    runtime.capabilities = {"hold": True}
    return runtime
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path` whose module has one callable of each kind."""
    (tmp_path / "umbp_test_plug_in.py").write_text(PLUG_IN_CODE)
    (tmp_path / "umbp_broken_plug_in.py").write_text("import umbp_a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def options_of(mode: str) -> Options:
    return parse_options({"mode": mode})


def refusal(mode: str) -> str:
    with pytest.raises(ConfigError) as caught:
        create_runtime(Options(mode=mode))
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_a_plug_in_is_found_by_its_mode_and_given_the_options(plug_ins: Path) -> None:
    write_plug_in(plug_ins, "attic", "umbp_test_plug_in:make")
    options = options_of("attic")
    assert isinstance(create_runtime(options), NullRuntime)
    from umbp_test_plug_in import made  # type: ignore[import-not-found]

    assert made == [options]
    assert "attic" in MODES.plug_ins()


def test_a_misspelt_mode_is_answered_with_the_nearest_one_and_the_list(plug_ins: Path) -> None:
    write_plug_in(plug_ins, "attic", "umbp_test_plug_in:make")
    assert "did you mean 'attic'" in refusal("atic")
    text = refusal("embeded")
    assert "did you mean 'embedded'" in text
    assert "attic" in text
    assert "embedded" in refusal("zzz")


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("umbp_broken_plug_in:make", "umbp_a_module_that_is_not_there"),
        ("umbp_test_plug_in:nothing_here", "nothing_here"),
        ("umbp_test_plug_in:falls", "ZeroDivisionError: oh"),
        ("umbp_test_plug_in:answers_nothing", "NoneType"),
        ("umbp_test_plug_in:boasts", "Capabilities"),
    ],
)
def test_a_plug_in_that_fails_is_one_sentence_that_names_it(plug_ins: Path, value: str, cause: str) -> None:
    write_plug_in(plug_ins, "attic", value)
    text = refusal("attic")
    assert cause in text
    assert "Capabilities" in text or ("attic" in text and value in text)


def test_a_plug_in_s_own_refusal_is_passed_on(plug_ins: Path) -> None:
    write_plug_in(plug_ins, "attic", "umbp_test_plug_in:refuses")
    with pytest.raises(SegmentError, match="no pool today"):
        create_runtime(options_of("attic"))


def test_a_plug_in_can_t_take_a_built_in_name(plug_ins: Path) -> None:
    write_plug_in(plug_ins, "embedded", "umbp_test_plug_in:make")
    assert isinstance(create_runtime(options_of("embedded")), EmbeddedRuntime)
    assert "embedded" not in MODES.plug_ins()


def test_two_plug_ins_of_one_mode_are_refused(plug_ins: Path) -> None:
    write_plug_in(plug_ins, "attic", "umbp_test_plug_in:make", "one-plugin")
    write_plug_in(plug_ins, "attic", "umbp_test_plug_in:falls", "other-plugin")
    text = refusal("attic")
    assert "one-plugin" in text
    assert "other-plugin" in text


def test_a_runtime_that_states_nothing_has_no_capabilities() -> None:
    class Silent:
        create_scheduler_handle = NullRuntime.create_scheduler_handle
        create_worker_handle = NullRuntime.create_worker_handle

    assert capabilities_of(Silent()) == Capabilities()
    assert capabilities_of(NullRuntime()).hold
