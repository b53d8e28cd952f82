"""The doctor's findings on machines that tests define."""

import importlib.metadata
from dataclasses import replace

import pytest
from machines import GOOD, H200, INSTALLED, PLAIN, T4

from perf_helpers import doctor
from trainmem.core import hardware, releases


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_good_machine_has_nothing_to_repair(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [])
    findings = doctor.diagnose(GOOD, INSTALLED)
    assert {finding.level for finding in findings} == {"ok"}
    assert {"GPU 0", "precision", "CPU", "memory"} <= {finding.subject for finding in findings}


@pytest.mark.parametrize(
    ("machine", "level", "subject", "text", "remedy"),
    [
        (PLAIN, "note", "GPU", "no NVIDIA GPU", "Colab"),
        (PLAIN, "note", "precision", "fp16 and bf16 operations are emulated", "fp32"),
        (replace(PLAIN, cpu_features=None), "note", "precision", "unknown", "lesson 07"),
        (replace(PLAIN, cpu_features=("amx_bf16",)), "ok", "precision", "native on this CPU", ""),
        (replace(PLAIN, cpu_features=("amx_bf16",)), "note", "fp16", "no instructions for fp16", "dtype=torch.float32"),
        (replace(GOOD, gpus=(T4,)), "note", "precision", "no native bf16", "fp16=True"),
        (replace(GOOD, gpus=(replace(T4, capability=(6, 1)),)), "note", "precision", "no native bf16", "fp32"),
        (replace(GOOD, gpus=(replace(T4, capability=(7, 0)),)), "error", "GPU 0", "CUDA 13", "CUDA 12.6"),
        (replace(GOOD, gpus=(replace(T4, free_bytes=10**9),)), "warning", "GPU 0", "Only 953.7 MiB", "nvidia-smi"),
        (replace(GOOD, gpus=(H200, T4)), "note", "GPUs", "2 GPUs are visible", "CUDA_VISIBLE_DEVICES=0"),
        (replace(GOOD, visible_reason="'-1' ends it"), "note", "GPU", "'-1' ends it", "unset CUDA_VISIBLE_DEVICES"),
        (replace(GOOD, nvml_reason="Unknown Error"), "warning", "NVML", "Unknown Error", "nvidia-smi"),
        (replace(GOOD, memory_available_bytes=10**9), "warning", "memory", "Only 1.00 GB of 64.00 GB", "--memory"),
        (replace(GOOD, shm_bytes=64_000_000), "warning", "/dev/shm", "64.0 MB", "--shm-size"),
        (replace(GOOD, cpu_cores=1), "warning", "CPU", "One core", "two cores"),
        (replace(GOOD, cpu_quota=2.5, cpu_cores=2), "warning", "CPU", "2.5 of 8 cores", "OMP_NUM_THREADS=2"),
    ],
)
def test_the_doctor_finds_it_and_says_what_to_do(machine, level, subject, text, remedy):
    found = [finding for finding in doctor.diagnose(machine, INSTALLED) if finding.level == level]
    assert [f for f in found if f.subject == subject and text in f.text and remedy in f.remedy], found


def test_every_finding_is_one_sentence_and_every_warning_has_a_remedy():
    worst = replace(PLAIN, cpu_cores=1, cpu_quota=0.5, shm_bytes=1, memory_available_bytes=1, nvml_reason="broken")
    findings = doctor.diagnose(worst, dict.fromkeys(hardware.PACKAGES))
    assert len(findings) >= 6 + len(hardware.PACKAGES)
    for finding in findings:
        assert finding.text[-1] == "." and "\n" not in finding.text
        assert finding.remedy or finding.level == "ok", finding


def test_a_missing_package_is_an_error_except_bitsandbytes():
    found = doctor.diagnose(PLAIN, {"torch": None, "bitsandbytes": None, "numpy": "2.0"})
    levels = {finding.subject: finding.level for finding in found if "is not installed" in finding.text}
    assert levels == {"torch": "error", "bitsandbytes": "note"}


@pytest.mark.parametrize(
    ("version", "outside"),
    [("2.10.1", True), ("2.11.0", False), ("2.13.0+cpu", False), ("2.16.0", True), ("2.15.0.dev1", False)],
)
def test_versions_outside_of_the_packages_own_requirement_are_named(monkeypatch, version, outside):
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["torch<2.16,>=2.11", 'ruff>=0.12; extra == "dev"']
    )
    found = doctor.diagnose(PLAIN, {"torch": version})
    ranged = [finding for finding in found if "tested range" in finding.text]
    assert [finding.subject for finding in ranged] == ["torch"] * outside
    assert all(finding.remedy == 'pip install "torch<2.16,>=2.11"' for finding in ranged)


def test_an_untested_torch_is_not_refused_and_says_what_is_tested(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11"])
    for version in ("2.99.0a0+git", "3.0.0"):
        (found,) = (each for each in doctor.diagnose(PLAIN, {"torch": version}) if each.subject == "torch")
        assert found.level == "warning" and f"torch {version} is untested" in found.text
        assert f"2.11 to {releases.NEWEST_TORCH}" in found.text and "accepted" in found.text
        assert "--torch" in found.remedy and f"torch=={releases.NEWEST_TORCH}.*" in found.remedy
    for version in (f"{releases.NEWEST_TORCH}.1+cu132", "2.11.0"):
        (found,) = (each for each in doctor.diagnose(PLAIN, {"torch": version}) if each.subject == "torch")
        assert found.level == "ok" and f"2.11 to {releases.NEWEST_TORCH}" in found.text and "--torch" in found.text


def test_verdicts_under_an_untested_torch_are_not_held_to_the_expected_ones(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11"])
    for version, supported in (("2.99.0", False), (f"{releases.NEWEST_TORCH}.0", True)):
        monkeypatch.setattr(doctor, "versions", lambda version=version: {"torch": version})
        assert doctor.is_supported() is supported


def test_a_checkout_that_is_not_installed_has_no_range(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert "torch" not in {finding.subject for finding in doctor.diagnose(PLAIN, {"torch": "0.1"})}


@pytest.mark.parametrize("features", [("avx512_fp16",), ("amx_fp16",), ("asimdhp",), None])
def test_fp16_is_not_spoken_of_where_a_cpu_has_it_or_nothing_is_known(features):
    assert "fp16" not in {finding.subject for finding in doctor.diagnose(replace(PLAIN, cpu_features=features))}
