"""The calculator in a browser: its numbers are the estimate's, and it works by keyboard, on a phone, light and dark.

The tables of a small model are made here, like those of the site. The site's own tables are tested nightly:

CHOICES=1000 python -m pytest -m nightly -s tests/website/test_calculator.py    1000 choices instead of 40
"""

import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from test_accessibility import CUT, OVERLAPPING
from test_tables import INDEX, KEYS, PRESENT

from trainmem import cards
from trainmem.core import optional_packages
from trainmem.estimate import estimate
from trainmem.texts import bytes_text

sys.path.append(str(Path(__file__).parents[2] / "website"))
import calculator_tables
import site_pages
from calculator_tables import QUESTIONS, Recipe

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM"
)

MODEL = "bert-tiny"
GIVEN = {
    "method": ["full"],
    "precision": ["fp32", "bf16"],
    "optimizer": ["adamw"],
    "checkpointing": ["off"],
    "accumulation": ["1"],
}


ANSWERED = """([words, done]) => {
    const { choice = "", done: state } = document.querySelector("#calculator-answer").dataset;
    return words.split("&").every(word => choice.includes(word + "&") || choice.endsWith(word))
        && [done, "all"].includes(state);
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build a site that has only the calculator's page; yield (address of the page, folder of the site)."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "website" / "_static", folder / "_static", ignore=shutil.ignore_patterns("tables"))
    tables = folder / "_static" / "tables"
    reported = [*calculator_tables.build(MODEL, GIVEN, tables)]
    assert len(reported) == 3
    refused = [calculator_tables.read(file).get("refused") for file in tables.rglob("*.gz")]
    assert refused == [None] * 3, "an operation whose memory is no sum of powers has no program in events.js"
    index = calculator_tables.index({"models": {MODEL: {}}}, tables)
    (tables / "index.json").write_text(json.dumps(index), encoding="utf-8")
    write_page(folder)
    with browser.served(folder) as address:
        yield f"{address}index.html", folder


def write_page(folder):
    """Write the calculator page as index.html into a folder, without the site's layout around it.

    The page loads its scripts and styles from the folder's _static, which must be there already.
    """
    source = site_pages.Sources(folder / "source", None).app("calculator.md")
    body = re.search(r"```\{raw\} html\n(.*?)```", source, re.DOTALL)[1]
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Does it fit?</title>'
    head += '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="_static/site.css">'
    head += "<style>:root{color-scheme:light dark} body{background:Canvas}</style></head>"
    html = f"{head}<body><main><h1>Does it fit?</h1>{body}</main></body></html>"
    (folder / "index.html").write_text(html, encoding="utf-8")


@pytest.fixture
def page(chromium, request):
    width, theme = getattr(request, "param", (1280, "light"))
    page = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme).new_page()
    yield page
    page.context.close()


def shown(page, address, choice, done="answer"):
    """Return the page's answer to a choice: the peak, reserved bytes, bytes by category, and whether it fits.

    Args:
        page: the browser page.
        address: address of the calculator's page.
        choice: {control of the page: value to choose}.
        done: the state that the page must report, e.g. "answer".
    """
    words = "&".join(f"{name}={value}" for name, value in choice.items())
    page.goto(f"{address}#{words}")
    page.wait_for_function(ANSWERED, arg=[words, done])
    found = page.evaluate("({ ...document.querySelector('#calculator-answer').dataset })")
    return {
        "peak": int(found["peak"]),
        "reserved": int(found["reserved"]),
        "parts": json.loads(found["parts"]),
        "fits": found["fits"],
    }


def estimated(choice):
    """Return the estimate's answer to a choice, in the form of `shown`: bytes, and whether the training fits.

    `choice`: {control of the page: value}.
    """
    recipe = Recipe(*(choice[name] for name in QUESTIONS), "")
    settings = "expandable_segments:True" if choice["segments"] == "expandable" else ""
    found = estimate(
        calculator_tables.Task(
            choice["model"], int(choice["length"]), 4 * choice["batch"] * int(choice["accumulation"])
        ),
        card=choice["card"],
        allocator_settings=settings,
        timeout=900,
        **recipe.arguments(choice["batch"]),
    )
    answer = found.fits(choice["card"]).answer
    return {
        "peak": found.peak_bytes,
        "reserved": found.memory.reserved_bytes,
        "parts": [*found.memory.breakdown.values()],
        "fits": "yes" if answer is True else "no" if answer is False else "edge",
    }


def choices(count):
    """Yield `count` random choices, {control of the page: value}, for which this test has tables."""
    chance, most = random.Random(39), 512
    for _ in range(count):
        choice = {"model": MODEL} | {name: chance.choice(GIVEN[name]) for name in QUESTIONS}
        able = [key for key, card in cards.CARDS.items() if choice["precision"] == "fp32" or card.capability[0] > 7]
        yield choice | {
            "batch": int(2 ** chance.uniform(0, 9)),
            "length": 128 * chance.randint(1, most // 128),
            "card": chance.choice(able),
            "segments": chance.choice(["default", "expandable"]),
        }


def test_the_page_says_what_the_estimate_does_to_the_byte(site, page):
    answers = set()
    for choice in choices(12):
        found = shown(page, site[0], choice)
        assert found == estimated(choice), choice
        answers.add(found["fits"])
    assert "yes" in answers


COUNT = int(os.environ.get("CHOICES", 40))


def published_choices(count):
    """Yield `count` random choices, {control of the page: value}, for which the site has tables; at most one in ten has
    a slow estimate.
    """
    chance = random.Random(41)
    keys = [(model, key) for model, key in PRESENT if not (key.startswith("lora") and optional_packages.offer("peft"))]
    cheap = [(model, key) for model, key in keys if "8bit" not in key and INDEX["models"][model]["parameters"] < 2e8]
    for number in range(count):
        model, key = chance.choice(cheap if number % 10 else keys)
        about, recipe = INDEX["models"][model], Recipe(*key.split("."))
        able = [card for card in cards.CARDS if recipe.kernels in ("any", kernels_of(card))]
        yield (
            {"model": model}
            | {name: getattr(recipe, name) for name in QUESTIONS}
            | {
                "batch": int(about["most"] ** chance.random()),
                "length": 128 * chance.randint(1, about["longest"] // 128),
                "card": chance.choice(able),
                "segments": chance.choice(["default", "expandable"]),
            }
        )


def kernels_of(card):
    return calculator_tables.OF_MAJOR.get(str(cards.CARDS[card].capability[0]))


SEEN = """() => [...document.querySelectorAll("#calculator-peak tbody tr")].map(
    row => [row.cells[0].innerText.trim(), Number(row.cells[2].innerText.replaceAll(",", ""))])"""


@pytest.mark.nightly
@pytest.mark.timeout(3600 + 60 * COUNT)
@pytest.mark.skipif(not PRESENT, reason="no table was made with the libraries installed here")
def test_what_the_site_shows_is_the_estimate_for_hundreds_of_choices(tmp_path, page):
    shutil.copytree(ROOT / "website" / "_static", tmp_path / "_static")
    write_page(tmp_path)
    wrong = []
    with browser.served(tmp_path) as address:
        for number, choice in enumerate(published_choices(COUNT), 1):
            found, expected = shown(page, f"{address}index.html", choice), estimated(choice)
            *own, (_, unused), _ = page.evaluate(SEEN)
            names = [name for name, _ in INDEX["categories"]]
            visible = [(name, size) for name, size in zip(names, expected["parts"], strict=True) if size > 0]
            is_seen = [*map(tuple, own)] == visible
            is_seen &= unused == max(expected["reserved"] - expected["peak"], 0)
            if found != expected or not is_seen:
                wrong.append(choice)
            print(f"{number - len(wrong)} of {number} choices equal to the byte", flush=True)
    assert wrong == []


def test_a_wrong_table_is_noticed(site, page):
    choice = next(choices(1))

    def wrong(route):
        file = site[1] / "_static" / route.request.url.partition("/_static/")[2]
        recipe = json.loads(gzip.decompress(file.read_bytes()))
        for part in recipe["parts"]:
            part["sums"] = [[first + 512 * any(rest), *rest] for first, *rest in part["sums"]]
        route.fulfill(body=gzip.compress(json.dumps(recipe).encode()))

    page.route("**/*.json.gz", wrong)
    assert shown(page, site[0], choice) != estimated(choice)


def test_the_command_on_the_page_answers_what_the_page_does(site, page):
    choice = next(choices(1)) | {"batch": 160}
    found = shown(page, site[0], choice)
    _, *words = shlex.split(page.locator("#calculator-commands pre").first.inner_text())
    command = [sys.executable, "-m", "perf_helpers.cli", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert [answer["peak_bytes"], answer["reserved_bytes"]] == [found["peak"], found["reserved"]]


def test_the_address_carries_the_choice_and_the_keyboard_makes_one(site, page):
    page.goto(site[0])
    page.locator("#choice-batch").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Tab")
    page.wait_for_function("location.hash.includes('batch=9')")
    before = page.evaluate("[location.href, document.querySelector('#calculator-answer').dataset.peak]")
    other = page.context.new_page()
    other.goto(before[0])
    other.wait_for_selector("#calculator-answer[data-done]")
    assert other.evaluate("[location.href, document.querySelector('#calculator-answer').dataset.peak]") == before


def test_a_config_json_that_is_pasted_chooses_its_model_or_says_what_is_nearest(site, page):
    config = calculator_tables.Task(MODEL).build_config().to_dict() | {"dtype": "float16", "layer_norm_eps": 1e-5}
    page.goto(site[0])
    page.locator("#calculator-paste summary").click()
    field, reported = page.locator("#calculator-config"), page.locator("#calculator-pasted")
    other = {"num_hidden_layers": 7, "quantization_config": {"load_in_4bit": True}}
    for text, words in (
        (json.dumps(config), f"In memory this is the same as {MODEL}, which is now chosen above."),
        (
            json.dumps(config | other),
            f"{MODEL}; it differs in num_hidden_layers (7, not 2), quantization_config (given",
        ),
        (json.dumps({"model_type": "<b>"}), "its model_type is none of bert"),
        ('{"model_type": "be', "This is not the config.json"),
    ):
        field.fill(text)
        assert words in reported.inner_text()
    field.fill(" ")
    assert reported.inner_text() == ""


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("llama-3.2-1b", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}),
        ("llama-3.2-1b", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 5, "pad_token_id": 7}),
        ("llama-3.2-1b", {"attention_dropout": 0.1}),
        ("bert-tiny", {"layer_norm_eps": 1e-5, "initializer_range": 0.1, "pad_token_id": 3}),
        ("bert-tiny", {"max_position_embeddings": 1024}),
    ],
)
def test_what_a_pasted_config_is_known_by_is_what_changes_bytes(model, change):
    layers, answers = {"num_hidden_layers": 1}, []
    for config in (layers, layers | change):
        task = calculator_tables.Task(model, 512, config=config)
        # In a smaller batch the optimizer's step is the peak, where a dropout's mask is freed already.
        found = estimate(task, card="a100", attn_implementation="eager", per_device_train_batch_size=8)
        answers.append((calculator_tables.sizing(task.build_config()), (found.peak_bytes, found.memory.reserved_bytes)))
    (one, its_bytes), (other, other_bytes) = answers
    assert (one == other) == (its_bytes == other_bytes)


def test_the_largest_that_fits_fits_and_the_next_does_not(site, page):
    choice = {"model": MODEL, "precision": "fp32", "length": 512, "card": "1650", "segments": "default"}
    shown(page, site[0], choice | {"batch": 4}, done="all")
    batch = int(page.evaluate("document.querySelector('#calculator-answer').dataset.largest").split()[0])
    assert 1 < batch < 512
    fits = [shown(page, site[0], choice | {"batch": size})["fits"] for size in (batch, batch + 1)]
    assert fits[0] == "yes" and fits[1] != "yes"


def test_trainings_that_others_measured_stand_beside_the_answer(site, page):
    record = json.loads((ROOT / "results" / "published.json").read_text(encoding="utf-8"))
    kept = [row for row in record["table"] if row["kind"] == "training" and row["like_for_like"]]
    shown(page, site[0], {"model": MODEL, "batch": 3})
    page.locator("#calculator-published summary").click()
    reported = page.locator("#calculator-published summary").inner_text()
    errors = sorted(abs(row["error"]) for row in kept)
    assert f"with {len(kept)} trainings" in reported and f"worst is {100 * errors[-1]:.2f} %" in reported
    median = 50 * (errors[len(kept) // 2] + errors[(len(kept) - 1) // 2])
    assert f"median error of the estimate is {median:.2f} %" in reported
    rows = page.locator("#calculator-published tbody tr")
    for row, text, link in zip(kept, rows.all_inner_texts(), rows.locator("a").all(), strict=True):
        repository, file, *_ = row["source"].split(", ")
        assert link.get_attribute("href") == f"https://github.com/{repository}/blob/{row['commit']}/{file}"
        sizes = [f"{row['published']:,.2f}", f"{row['predicted']:,.2f}", f"{100 * row['error']:+.3f} %"]
        name = row["name"].partition(", ")[2].replace("per_device_train_batch_size", "micro-batch")
        assert text.split("\t")[:-1] == [name, *sizes, row["quantity"], row["gpu"]]
    rows.last.evaluate(f"row => {{ row.cells[0].textContent = '{MODEL.upper()}, of the chosen model' }}")
    shown(page, site[0], {"model": MODEL, "batch": 4})
    assert "of the chosen model" in rows.first.inner_text() and rows.count() == len(kept)


@pytest.mark.parametrize("page", [(w, theme) for w in (360, 1280) for theme in ("light", "dark")], indirect=True)
def test_the_page_keeps_the_standard_and_nothing_on_it_is_cut_off(site, page):
    choice = {"model": MODEL, "precision": "fp32", "batch": 512, "length": 512, "card": "4090"}
    shown(page, site[0], choice, done="all")
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    assert page.evaluate(CUT) == [] and page.evaluate(OVERLAPPING) == []
    assert browser.violations(page) == []


def test_a_line_names_its_cards_on_focus_and_on_hover(site, page):
    shown(page, site[0], {"model": MODEL, "precision": "fp32", "batch": 512, "length": 512, "card": "4090"})
    lines = page.locator(".calculator-line")
    assert lines.count() > 5
    sizes = [int(size) for size in re.findall(r"sold with (\d+) GiB", " ".join(labels(lines)))]
    assert len(sizes) == len(set(sizes)) == lines.count() - 1, "one line per size, and the chosen card's"
    for label in labels(lines):
        assert re.fullmatch(r"RTX 4090 24 GiB: 23\.64 GiB, the chosen card|Cards sold with .*: [\d.]+ GiB", label)
    line = lines.nth(1)
    hint = line.locator("xpath=following-sibling::*[1]")
    assert not hint.is_visible()
    line.focus()
    assert hint.is_visible() and hint.inner_text() == line.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not hint.is_visible()
    line.hover()
    assert hint.is_visible()


def labels(elements):
    return [each.get_attribute("aria-label") for each in elements.all()]


def test_the_operation_at_the_peak_has_a_plain_name_and_its_own_in_a_hint(site, page):
    shown(page, site[0], {"model": MODEL, "precision": "fp32", "batch": 512, "length": 512, "card": "4090"})
    term = page.locator(".calculator-term")
    assert "aten." not in term.inner_text() and "aten." in term.get_attribute("aria-label")
    term.focus()
    assert term.locator("xpath=following-sibling::*[1]").inner_text().startswith("aten.")


def test_sizes_on_the_page_are_those_that_the_package_writes_beside_a_card(site, page):
    found = shown(page, site[0], {"model": MODEL, "precision": "fp32", "batch": 512, "length": 512, "card": "4090"})
    text = page.locator("#calculator-answer").inner_text()
    assert f"At the peak {bytes_text(found['peak'], binary=True)} are in use" in text
    assert not re.search(r"\d (kB|MB|GB)\b", text)


@pytest.mark.skipif(not shutil.which("node"), reason="no node: apt-get install nodejs")
def test_every_operation_of_the_published_tables_has_a_plain_name():
    operations = {label[2] for model, key in KEYS for part in table(model, key)["parts"] for label in part["labels"]}
    script = "import { operationText } from './operations.js'; const names = JSON.parse(process.argv[1]);"
    script += "console.log(JSON.stringify(names.map(operationText)))"
    command = ["node", "--input-type=module", "-e", script, json.dumps(sorted(operations))]
    done = subprocess.run(command, cwd=ROOT / "website" / "_static", capture_output=True, text=True, check=True)
    assert [name for name in json.loads(done.stdout) if re.search(r"\baten\b|[._]|^$", name)] == []


def table(model, key):
    return calculator_tables.read(ROOT / "website" / "_static" / "tables" / model / f"{key}.json.gz")
