"""Compare our model of torch's caching allocator with the allocator itself in rehearsals, on a part of the traces of
benchmarks/measure_allocator.py.
"""

import re
import sys

import cloudpickle
import pytest
from machines import TINY

from trainmem.core import hardware
from trainmem.estimate import estimate
from trainmem.estimate.allocator_settings import (
    _ELSEWHERE,
    _READERS,
    _UNSUPPORTED,
    RELEASES,
    Settings,
    release,
)
from trainmem.rehearsal import Rehearsal, build, rehearse

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)


def newer_than(release_of_torch):
    """Return whether a release of torch, e.g. "2.14", is newer than the installed one."""
    here, other = ([*map(int, each.split(".")[:2])] for each in (hardware.versions()["torch"], release_of_torch))
    return other > here


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.nightly
@pytest.mark.parametrize("expandable", [False, True])
def test_a_nearly_full_card_is_counted_as_torch_counts_it(measure, expandable):
    """The model of the allocator agrees with torch's own on 75 random traces, some of which run out of memory.

    Several options of PYTORCH_CUDA_ALLOC_CONF are set at once, so that the rules of each option affect the others.
    """
    text = "garbage_collection_threshold:0.4,roundup_power2_divisions:[2:4,>:2],max_split_size_mb:48"
    text += f",large_segment_size_mb:26,expandable_segments:{expandable}"
    found = measure.rehearsed(measure.BARE, text, [f"test-{number}" for number in range(75)])
    assert found["traces"] == 75 and found["out_of_memory"] > 5 and found["mismatches"] == []


@pytest.mark.nightly
def test_default_settings_are_counted_as_torch_counts_them(measure):
    found = measure.rehearsed(measure.FULL, "", [f"test-{number}" for number in range(150)])
    assert found["traces"] == 150 and found["retries"] > 20 and found["mismatches"] == []


@pytest.mark.nightly
def test_a_double_with_another_rule_is_found_out(measure, monkeypatch):
    """The comparison must find mismatches if torch has segments of 64 MiB, but the estimate's allocator 20 MiB."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:64")
    with Rehearsal(measure.ROOM) as stage:
        found = stage.submit(measure.compare, "", ["test-0", "test-1", "test-2", "test-3"]).result()
    assert found["mismatches"]


@pytest.mark.nightly
def test_the_rules_of_another_release_are_found_out(measure):
    """The comparison must find mismatches if the estimate's allocator uses another torch release's rules: the traces
    often have several free blocks of equal size, from which the releases choose differently.
    """
    here, seeds = release(), [f"test-{number}" for number in range(40)]
    others = {each.ties: name for name, each in RELEASES.items() if each.ties != here.ties}
    with Rehearsal(measure.ROOM) as stage:
        found = {ties: stage.submit(measure.compare, "", seeds, name).result() for ties, name in others.items()}
        assert stage.submit(measure.compare, "", seeds).result()["mismatches"] == []
    assert len(others) == 2 and all(each["mismatches"] for each in found.values())


RESERVE = "expandable_segments:True,expandable_segments_reserve:"


@pytest.mark.nightly
@pytest.mark.skipif(newer_than("2.15"), reason="options of torch 2.15")
@pytest.mark.parametrize(
    ("card", "text"),
    [
        ("ROOM", RESERVE + "0.25G"),
        ("BARE", RESERVE + "0.005G"),  # less than a page: one
        ("BARE", RESERVE + "100G"),  # more than the card has
        ("BARE", RESERVE + "noneG"),  # torch ignores it
        ("ROOM", "expandable_segments:True,expandable_segments_reserve_by_class:[a:0.1G,b:0.5]"),
    ],
)
def test_a_reserve_of_expandable_segments_is_counted_as_torch_counts_it(measure, card, text):
    found = measure.rehearsed(getattr(measure, card), text, [f"test-{number}" for number in range(40)])
    assert found["traces"] == 40 and found["mismatches"] == []
    assert found["out_of_memory"] > 100 or not text.endswith("0.005G")


def of_environment():
    """Return how many MiB torch reserves when a tensor of 2 MiB is made: the value of large_segment_size_mb in
    PYTORCH_CUDA_ALLOC_CONF, or 20.
    """
    import torch

    kept = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved() >> 20
    del kept
    return reserved


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cuda", "plain", "reserved"),
    [("64", None, 64), (None, "32", 32), ("64", "32", 64), ("", "32", 20)],
)
def test_the_variable_with_cuda_in_its_name_counts_alone_where_it_is_set(measure, monkeypatch, cuda, plain, reserved):
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", cuda), ("PYTORCH_ALLOC_CONF", plain)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, f"large_segment_size_mb:{value}" if value else "")
    with Rehearsal(measure.ROOM) as stage:
        assert stage.submit(of_environment).result() == reserved


OPTIONS = {
    "expandable_segments_reserve": "4G",
    "expandable_segments_reserve_by_class": "[a:4G]",
    "pinned_max_cached_size_mb": "64",
    "pinned_max_round_threshold_mb": "64",
}


@pytest.mark.nightly
def test_options_of_other_releases_are_refused_where_this_torch_refuses_them(measure):
    def is_parsed(text):
        try:
            return bool(Settings.parse(text, hardware.versions()["torch"]))
        except ValueError:
            return False

    texts = [f"{name}:{value}" for name, value in OPTIONS.items()]
    with Rehearsal(measure.ROOM) as stage:
        torch_says = stage.submit(lambda: {text: accepted(text) for text in texts}).result()
    assert {text: is_parsed(text) for text in texts} == torch_says


def test_every_option_that_this_torch_names_is_known():
    """The estimate's allocator must accept or refuse, by name, each allocator option that torch's libraries contain."""
    libraries = build._site_packages(build.interpreter()) / "torch" / "lib"
    named = b"".join((libraries / name).read_bytes() for name in ("libc10.so", "libc10_cuda.so"))
    like = rb"\0((?:pinned|expandable_segments|max_|large_segment|roundup|release_lock|graph_capture)_?[a-z0-9_]+)\0"
    found = {name.decode() for name in re.findall(like, named)}
    known = _READERS.keys() | _ELSEWHERE | _UNSUPPORTED.keys()
    assert found & known and {name for name in found - known if name.endswith(("_mb", "reserve", "class"))} == set()


ACCEPTED = {
    "max_split_size_mb:20": True,
    "max_split_size_mb:19": False,
    "large_segment_size_mb:32,max_split_size_mb:20": False,
    "large_segment_size_mb:10": False,
    "max_non_split_rounding_mb:8": False,
    "garbage_collection_threshold:0.5": True,
    "per_process_memory_fraction:1.1": False,
    "roundup_power2_divisions:4": True,
    "roundup_power2_divisions:3": False,
    "roundup_power2_divisions:[256:1,512:0,>:8]": True,
    "roundup_power2_divisions:[3:2]": False,
    "expandable_segments:true": False,
    "throw_on_cudamalloc_oom:1": False,
    "pinned_num_register_threads:8 , backend:native": True,
    "max_split_size:20": False,
}


def accepted(text):
    import torch

    try:
        torch.cuda.memory._set_allocator_settings(text)
    except (ValueError, RuntimeError):
        return False
    return True


@pytest.mark.nightly
def test_settings_are_refused_where_torch_refuses_them(measure):
    def is_parsed(text):
        try:
            return bool(Settings.parse(text))
        except ValueError:
            return False

    with Rehearsal(measure.ROOM) as stage:
        torch_says = stage.submit(lambda: {text: accepted(text) for text in ACCEPTED}).result()
    assert torch_says == ACCEPTED
    assert {text: is_parsed(text) for text in ACCEPTED} == ACCEPTED


def test_a_record_names_the_versions_that_rehearsed(measure):
    versions = sys.modules["runner"].stamp(rehearsed=True)["versions"]
    with Rehearsal(measure.ROOM) as stage:
        assert versions == stage.submit(hardware.versions).result() and versions["torch"]


def of_a_loop(name):
    """Return a loop that runs forward and backward three times, and keeps the three losses.

    `name`: a loss function of torch.nn.functional, called here for the mean over half a million elements.
    """

    def loop(task):
        import torch

        model = torch.nn.Linear(500, 1000).to("cuda")
        batch, target = (torch.rand(500, size).to(model.weight.device) for size in (500, 1000))
        losses = []
        for _ in range(3):
            loss = getattr(torch.nn.functional, name)(model(batch), target)
            loss.backward()
            losses.append(loss.detach())

    return loop


@pytest.mark.nightly
def test_the_memory_that_a_loss_keeps_is_that_of_its_kernel():
    """Estimate and rehearsal must have the same peak if a loop keeps losses, whatever memory the loss' kernel keeps.

    The mean from `mse_loss` keeps memory for one number per element; the mean from `l1_loss` for a single number.
    """
    for name in ("mse_loss", "l1_loss"):
        rehearsed = rehearse(of_a_loop(name), on="a100", task=TINY)
        estimated = estimate(TINY, device="cuda", compute_capability=(8, 0), function=of_a_loop(name))
        assert rehearsed.ok and estimated.peak_bytes == rehearsed.peak_bytes, name


def of_a_model(make):
    """Return a loop that trains a model for three steps; `make(torch.nn)` must return (the model, shape of a batch)."""

    def loop(task):
        import torch

        model, shape = make(torch.nn)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, batch = model.to(device), torch.rand(shape).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            made = model(batch)
            torch.nn.functional.binary_cross_entropy_with_logits(made, torch.ones_like(made)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def of_cells(nn):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LSTMCell(64, 96), nn.GRUCell(96, 300)

        def forward(self, rows):
            state = output = None
            for row in rows:
                state = self.first(row, state)
                output = self.second(state[0], output)
            return output

    return Cells(), (5, 200, 64)


MODELS = {
    "batch norm": lambda nn: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (4, 3, 34, 34)),
    "RMS norm": lambda nn: (nn.Sequential(nn.Linear(64, 200), nn.RMSNorm(200), nn.Linear(200, 300)), (500, 64)),
    "depthwise, of volumes": lambda nn: (nn.Conv3d(8, 8, 3, groups=8), (2, 8, 9, 10, 11)),
    "patches": lambda nn: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Unfold(4, stride=4)), (4, 3, 66, 66)),
    "cells": of_cells,
}


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_loop_is_that_of_cudas_kernels(name):
    loop = of_a_model(MODELS[name])
    rehearsed = rehearse(loop, on="a100", task=TINY)
    estimated = estimate(TINY, card="a100", function=loop)
    assert rehearsed.ok and estimated.peak_bytes == rehearsed.peak_bytes


def that_casts(torch, device):
    """Train a model that was cast to 16 bits by `model.bfloat16()`."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU()).bfloat16().to(device)
    for _ in range(2):
        model(torch.rand(32, 300).bfloat16().to(device)).mean().backward()


def that_copies_to_the_host(torch, device):
    """Copy the weights to the host after each step; at the end move the model there and use the freed device memory."""
    model = torch.nn.Linear(500, 500).to(device)
    for _ in range(3):
        model(torch.rand(8, 500).to(device)).mean().backward()
        best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    model.cpu()
    return best, torch.rand(500, 700).to(device)


def that_evaluates(torch, device):
    """Train, then evaluate in inference mode under autocast; read the loss as a number."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 2048)
    model = torch.nn.Sequential(layer, torch.nn.Linear(64, 3000)).to(device)
    model(torch.rand(4, 17, 64).to(device)).mean().backward()
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
        return model(torch.rand(60, 17, 64).to(device)).logsumexp(-1).mean().item()


def that_aligns(torch, device):
    """Train by CTC's loss on padded transcripts."""
    model = torch.nn.Linear(64, 200).to(device)
    for _ in range(2):
        scores = model(torch.rand(300, 4, 64).to(device)).log_softmax(-1)
        targets = torch.ones(4, 30, dtype=torch.long).to(device)
        torch.nn.functional.ctc_loss(scores, targets, torch.full((4,), 300), torch.full((4,), 30)).backward()


def that_saves(torch, device):
    """Save a checkpoint of the model and the optimizer's states, and load it again."""
    import io

    model, file = torch.nn.Linear(500, 500).to(device), io.BytesIO()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.rand(8, 500).to(device)).mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=device)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def that_changes_some_rows(torch, device):
    """Train an embedding whose gradient is sparse."""
    model = torch.nn.Embedding(1000, 64, sparse=True).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.zeros(16, 20, dtype=torch.long).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def that_sends_its_data_first(torch, device):
    """Send data before the model exists, and take rows of the data on the device by indices on the host."""
    torch.set_default_device(device)
    rows = torch.rand(3000, 200)
    torch.set_default_device(None)
    data, model = torch.rand(3000, 200).to(device), torch.nn.Linear(200, 5)
    model.to(device)
    for _ in range(3):
        chosen = torch.randperm(3000)[:2000]
        model(data[chosen] + rows[chosen]).mean().backward()


def that_sends_data_again(torch, device):
    """Send the same data in each step, while what was sent before is still there."""
    data, model = torch.rand(512, 3000), torch.nn.Linear(3000, 3).to(device)
    for _ in range(3):
        sent = data.to(device)
        model(sent).mean().backward()


def that_keeps_activations_on_the_host(torch, device):
    """Keep the tensors saved for backward on the host: first in ordinary memory, then in pinned memory."""
    layers = torch.nn.Linear(600, 1200), torch.nn.ReLU(), torch.nn.Linear(1200, 600)
    model = torch.nn.Sequential(*layers).to(device)
    for pinned in (False, True):
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            loss = model(torch.rand(500, 600).to(device)).square().mean()
        loss.backward()


def that_averages_weights(torch, device):
    """Train in channels last and average the weights by `AveragedModel`, which keeps its counter on the host."""
    layers = torch.nn.Conv2d(3, 64, 5), torch.nn.BatchNorm2d(64), torch.nn.Flatten(), torch.nn.Linear(64 * 16, 300)
    model = torch.nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    for _ in range(3):
        model(torch.rand(4, 3, 8, 8).to(device, memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


def that_multiplies_pairs(torch, device):
    """Train a layer that multiplies two inputs."""
    model = torch.nn.Bilinear(20, 30, 4).to(device)
    for _ in range(2):
        model(*(torch.rand(128, size).to(device) for size in (20, 30))).square().mean().backward()


def that_enlarges_and_compares(torch, device):
    """Train a segmentation of images that concatenates the images with enlarged features; classes are one-hot."""
    nn = torch.nn
    model, last = nn.Conv2d(3, 16, 3, padding=1).to(device), nn.Conv2d(19, 64, 1).to(device)
    enlarge = nn.Upsample(scale_factor=2, mode="bilinear")
    for _ in range(2):
        images, classes = torch.rand(2, 3, 64, 64).to(device), torch.zeros(2, 64, 64, dtype=torch.long).to(device)
        made = last(torch.cat([images, enlarge(model(images[:, :, ::2, ::2]))], 1))
        hot = nn.functional.one_hot(classes, 1024)[..., :64]
        (made.permute(0, 2, 3, 1) * hot).mean().backward()


def that_penalizes_gradients(torch, device):
    """Train a critic by WGAN-GP's loss, which penalizes its gradient: a backward pass through a backward pass."""
    nn = torch.nn
    layers = nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 256, 1)
    critic = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(critic.parameters())
    for _ in range(3):
        real, made = (torch.rand(64, 3, 32, 32).to(device) for _ in range(2))
        share = torch.rand(64, 1, 1, 1, device=device)
        mixed = (share * real + (1 - share) * made).requires_grad_(True)
        scores = critic(mixed)
        (gradient,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
        penalty = ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        (critic(made).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer.step()


def that_takes_gradients(torch, device):
    """Train by `torch.autograd.grad`, which sums gradients of branches in place."""
    layers = torch.nn.Linear(64, 1280), torch.nn.Tanh(), torch.nn.Linear(1280, 640)
    model, branch = torch.nn.Sequential(*layers).to(device), torch.nn.Linear(640, 640).to(device)
    weights = [*model.parameters(), *branch.parameters()]
    for _ in range(2):
        made = model(torch.rand(4000, 64, device=device))
        loss = (made + branch(made) + made.sin()).square().mean() + (made * 2).mean()
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(0.1 * gradient)


def that_trains_one_model_after_another(torch, device):
    """Train three models; each replaces the one before, as in a search or a cross-validation."""
    for width in (1000, 2000, 1500):
        layers = torch.nn.Linear(500, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.rand(64, 500).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def that_normalizes_in_16_bits(torch, device):
    """Train on images in channels last, in bfloat16, with a norm that is trained and a frozen one."""
    nn = torch.nn
    layers = [nn.Conv2d(3, 512, 3, bias=False), nn.BatchNorm2d(512), nn.ReLU(), nn.Conv2d(512, 256, 1, bias=False)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(256).eval()).to(device, memory_format=torch.channels_last)
    for _ in range(2):
        images = torch.rand(4, 3, 34, 34).to(device, memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()


def that_differentiates_forward(torch, device):
    """Train on the values and forward-mode derivatives of a model; most derivatives of its weights are zeros."""
    layers = torch.nn.Linear(640, 1280), torch.nn.Tanh(), torch.nn.Linear(1280, 320)
    model = torch.nn.Sequential(*layers).to(device)
    rows, directions = (torch.rand(16, 640, device=device) for _ in range(2))
    for _ in range(2):
        made, derivatives = torch.func.jvp(model, (rows,), (directions,))
        (made.square().mean() + derivatives.square().mean()).backward()


def that_packs_sequences(torch, device):
    """Train on packed sequences, whose lengths are known on the host."""
    rnn = torch.nn.utils.rnn
    embedding, layer = torch.nn.Embedding(100, 160).to(device), torch.nn.Linear(160, 50).to(device)
    for _ in range(2):
        tokens, lengths = torch.ones(4, 100, dtype=torch.long).to(device), torch.tensor([100, 80, 50, 30])
        packed = rnn.pack_padded_sequence(embedding(tokens), lengths, batch_first=True)
        packed = rnn.PackedSequence(layer(packed.data), packed.batch_sizes)
        made, _ = rnn.pad_packed_sequence(packed, batch_first=True)
        parts = rnn.pad_sequence([made[0, :30], made[1, :70]], batch_first=True)
        (made.square().mean() + parts.mean()).backward()


def that_finds_a_shape_first(torch, device):
    """Run a module on the host before it is sent, to find the shape of its result; then turn and compare images."""
    nn = torch.nn
    features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    with torch.no_grad():
        width = features(torch.zeros(1, 3, 64, 64)).shape[1]
    model, turn = nn.Sequential(features, nn.Linear(width, 60)).to(device), nn.Linear(2, 6).to(device)
    for _ in range(2):
        images = torch.rand(16, 3, 64, 64).to(device)
        grid = nn.functional.affine_grid(turn(images[:, 0, 0, :2]).view(-1, 2, 3), images.shape, align_corners=False)
        made = model(nn.functional.grid_sample(images, grid, align_corners=False))
        torch.cdist(made.repeat(20, 1), made, p=1).mean().backward()


def that_reduces_neighbors(torch, device):
    """Train on a graph whose nodes take the mean of their neighbors; enlarge images in channels last."""
    nn = torch.nn
    layer, turned = nn.Linear(32, 64).to(device), nn.ConvTranspose2d(16, 3, 4, 2, 1).to(device)
    targets = torch.randint(0, 100, (40_000,)).to(device)[:, None].expand(-1, 64)
    for _ in range(2):
        nodes = layer(torch.rand(100, 32).to(device))
        means = torch.zeros(100, 64, device=device).scatter_reduce(0, targets, nodes.repeat(400, 1), "mean")
        made = turned(means.view(4, 20, 20, 4, 1).expand(-1, -1, -1, -1, 4).flatten(3).permute(0, 3, 1, 2))
        nn.functional.mse_loss(made, torch.rand(4, 3, 40, 40).to(device)).backward()


def that_sends_a_graph(torch, device):
    """Send a sparse adjacency matrix, and make another one from positions that are on the device."""
    number = torch.arange(8000)
    positions = torch.stack([number % 2000, number // 4])
    adjacency = torch.sparse_coo_tensor(positions, torch.ones(8000), (2000, 2000)).to(device)
    positions = positions.to(device)
    same = torch.sparse_coo_tensor(positions, torch.ones(8000, device=device), (2000, 2000))
    layer = torch.nn.Linear(20, 10).to(device)
    for _ in range(2):
        layer(torch.rand(2000, 20).to(device)).mean().backward()
    return adjacency, same


EVERYDAY = (that_evaluates, that_changes_some_rows, that_casts, that_copies_to_the_host, that_aligns, that_saves)
EVERYDAY += (that_sends_its_data_first, that_sends_data_again, that_keeps_activations_on_the_host)
EVERYDAY += (that_averages_weights, that_multiplies_pairs, that_enlarges_and_compares, that_penalizes_gradients)
EVERYDAY += (that_takes_gradients, that_trains_one_model_after_another, that_normalizes_in_16_bits)
EVERYDAY += (that_differentiates_forward, that_packs_sequences, that_finds_a_shape_first, that_sends_a_graph)
EVERYDAY += (that_reduces_neighbors,)
EVERYDAY = {each.__name__: each for each in EVERYDAY}


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_loop_that_does_everyday_things_is_estimated(name):
    run = EVERYDAY[name]

    def loop(task):
        import torch

        run(torch, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    rehearsed = rehearse(loop, on="a100", task=TINY)
    estimated = estimate(TINY, card="a100", function=loop)
    assert rehearsed.ok and estimated.peak_bytes == rehearsed.peak_bytes
    assert estimated.memory.reserved_bytes == rehearsed.memory.reserved_bytes
    if run not in (that_takes_gradients, that_penalizes_gradients):  # autograd's thread may free its last tensors later
        assert estimated.memory.phases == rehearsed.memory.phases
