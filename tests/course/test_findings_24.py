"""Lesson 24's findings in libraries: these tests fail as soon as a release fixes a finding or moves its code."""

import importlib.util
from pathlib import Path

import pytest
import torch
from lesson_24 import functions


@pytest.mark.nightly
def test_torch_finds_pips_own_compiler_only_where_cuda_home_names_it():
    found = functions().searched()
    assert {name: ready for name, (ready, _) in found.items()} == {
        "pip's torch": False,
        "beside nvidia-cuda-nvcc": False,  # pytorch PR 197483 would change it
        "and CUDA_HOME": True,
    }
    assert "CUDA_HOME" in found["pip's torch"][1]


def test_pips_runtime_has_no_library_of_the_name_that_the_linker_asks_for():
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(place, "cu13", "lib") for place in (nvidia.submodule_search_locations if nvidia else ())]
    folders = [folder for folder in folders if any(folder.glob("libcudart.so.*"))]
    if not folders:
        pytest.skip("torch's CUDA build is not installed")
    assert not any((folder / "libcudart.so").exists() for folder in folders)


@pytest.mark.nightly
def test_after_eight_graphs_torch_compiles_that_function_no_more():
    graphs = functions().graphs
    assert graphs(range(2, 12), dynamic=False) == torch._dynamo.config.recompile_limit == 8
    assert graphs(range(2, 12), 20, dynamic=False) == 10


def test_a_size_that_has_changed_once_is_left_open():
    graphs = functions().graphs
    assert graphs(range(1, 8)) == 2
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        assert graphs(range(1, 6)) == 5
