"""Where nothing fits: by how much, and what would help."""

from perf_helpers import Task

MB = 10**6


def test_where_nothing_fits_it_says_by_how_much_and_what_would(ask):
    advice = ask(memory=150 * MB, effective_batch=64)
    assert advice.status == "nothing fits" and advice.recipes == ()
    assert -advice.smallest.headroom_bytes == advice.smallest.needed_bytes - 150 * MB
    assert advice.smallest.needed_bytes == 201 * MB
    changes = {change.name: change for change in advice.changes}
    assert changes["sharding"].fits and changes["sharding"].text == "over 2 devices, at most 64 samples each at a time"
    assert changes["sharding"].needed_bytes == 201 * MB // 2 and changes["sharding"].assumption
    assert not changes["offload"].fits and changes["offload"].needed_bytes == 200 * MB
    assert changes["offload"].text == "optimizer states off the device: 1.0 MB on the host"
    assert not changes["fewer tokens"].fits
    assert "nothing fits" in repr(advice) and "51.0 MB over" in repr(advice)
    only = ask(memory=330 * MB, must={"optim": "adamw_torch_fused", "gradient_checkpointing": False})
    assert {change.name for change in only.changes if change.fits} == {"sharding", "offload"}


def test_where_samples_are_too_few_to_share_it_says_that_the_batch_grows(ask):
    (sharding,) = (change for change in ask(memory=30 * MB, effective_batch=2).changes if change.name == "sharding")
    assert not sharding.fits and "2 samples a step cannot be shared by so many" in sharding.text


def test_a_shorter_sequence_is_the_longest_that_fits(ask):
    fixed = {"optim": "sgd", "gradient_checkpointing": False, "per_device_train_batch_size": 32}
    advice = ask(task=Task("bert-tiny", seq_len=256), memory=1163 * MB, must=fixed)
    change = next(change for change in advice.changes if change.name == "fewer tokens")
    assert change.text.startswith("seq_len=120 instead of 256") and change.needed_bytes == 1160 * MB
