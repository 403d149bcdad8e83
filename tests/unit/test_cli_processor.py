"""Which processors multiply bfloat16 themselves, as /proc/cpuinfo has it."""

from pathlib import Path

import pytest

from baton_cli import processor

ZEN_3 = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu avx2 fma\n"


@pytest.mark.parametrize(
    ("cpuinfo", "does"),
    [
        (ZEN_3, False),
        (ZEN_3.replace("fma", "avx512f avx512_bf16"), True),
        (ZEN_3.replace("fma", "avx512f amx_bf16"), True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("flags\t: avx512_bf16\nflags\t: avx2\n", False),  # cores that differ
        ("", False),
        ("model name\t: flags of avx512_bf16\n", False),
    ],
)
def test_a_processor_says_whether_it_multiplies_bfloat16(cpuinfo: str, does: bool) -> None:
    assert processor.multiplies_bfloat16(cpuinfo) is does


def test_a_machine_that_does_not_tell_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "absent")
    assert processor.multiplies_bfloat16_here() is False
