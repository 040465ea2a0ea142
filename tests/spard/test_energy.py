"""Energy is read where the machine tells it, over the counter's end too, and its absence has a reason."""

from __future__ import annotations

from pathlib import Path

from spard.training.compute import EnergyMeter


def write_zone(powercap: Path, microjoules: int, number: int = 0) -> Path:
    """A package's zone as the kernel shows it, and one of its cores, which is in the package's figure already."""
    zone = powercap / f"intel-rapl:{number}"
    for each, name in ((zone, f"package-{number}"), (powercap / f"intel-rapl:{number}:0", "core")):
        each.mkdir(parents=True, exist_ok=True)
        (each / "name").write_text(f"{name}\n")
        (each / "max_energy_range_uj").write_text("1000000000\n")
        (each / "energy_uj").write_text(f"{microjoules}\n")
    return zone


def test_joules_are_what_the_package_counts_between_two_looks(tmp_path: Path) -> None:
    zone = write_zone(tmp_path, 5_000_000)
    meter = EnergyMeter(tmp_path, gpus=())
    (zone / "energy_uj").write_text("7500000\n")
    assert meter.consumed_joules() == {"intel-rapl:0 package-0": 2.5}
    assert meter.consumed_joules() == {"intel-rapl:0 package-0": 0.0}
    assert meter.missing == []


def test_a_counter_that_began_anew_goes_on(tmp_path: Path) -> None:
    zone = write_zone(tmp_path, 999_000_000)
    meter = EnergyMeter(tmp_path, gpus=())
    (zone / "energy_uj").write_text("1000000\n")
    assert meter.consumed_joules() == {"intel-rapl:0 package-0": 2.0}


def test_two_packages_are_two_devices(tmp_path: Path) -> None:
    write_zone(tmp_path, 0), write_zone(tmp_path, 0, number=1)
    assert set(EnergyMeter(tmp_path, gpus=()).consumed_joules()) == {"intel-rapl:0 package-0", "intel-rapl:1 package-1"}


def test_a_machine_without_counters_says_why(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path / "none", gpus=())
    assert meter.consumed_joules() == {}
    (reason,) = meter.missing
    assert "has no zone intel-rapl:N" in reason


def test_a_counter_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    zone = write_zone(tmp_path, 0)
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()  # root may read every file: a folder is refused to root as well
    meter = EnergyMeter(tmp_path, gpus=())
    assert meter.consumed_joules() == {}
    assert "energy_uj cannot be read" in meter.missing[0]


def test_a_counter_that_goes_away_ends_the_measuring_and_says_so(tmp_path: Path) -> None:
    zone = write_zone(tmp_path, 0)
    meter = EnergyMeter(tmp_path, gpus=())
    (zone / "energy_uj").unlink()
    assert meter.consumed_joules() == {}
    assert "could not be read any more" in meter.missing[0]
