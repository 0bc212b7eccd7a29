"""The code in README and docs runs as it stands; the examples run."""

import inspect
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread

import mheads as package
from mheads.config import schema
from mheads.networks import NETWORKS

ROOT = Path(__file__).parents[2]
PAGES = [page for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "```python" in page.read_text()]

TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *(ROOT / "docs").glob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)
    if page.name == "one_answer.md":
        assert all(1 <= len(answers) <= 4 for answers in names["candidates"])
        assert names["accuracy"] > 80
    assert len(names) > 2  # it did something


def write_csv(path, targets):
    """Rows of four numbers and one of the targets, under a header."""
    rows = [f"{i},{i % 7},0.5,-1,{targets[i % len(targets)]}" for i in range(150)]
    path.write_text("\n".join(["a,b,c,d,target", *rows]))


@pytest.mark.parametrize(
    ("targets", "override", "problem", "outputs"),
    [
        (["cat", "dog", "horse"], [], "classification", 3),
        (["0", "1", "2"], [], "classification", 3),
        (["0", "1", "2"], ["data.problem=regression"], "regression", 1),
        (["0.5", "1", "2"], [], "regression", 1),
    ],
)
def test_a_csv_file_of_classes_or_numbers_is_learned_as_the_page_says(
    targets, override, problem, outputs, tmp_path, monkeypatch, mheads
):
    monkeypatch.chdir(tmp_path)
    write_csv(Path("table.csv"), targets)
    section = (ROOT / "docs/data.md").read_text().partition("\n## CSV files\n")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^    mheads (.*)", section, re.MULTILINE)
    words = shlex.split(command.replace("outputs: 3", f"outputs: {outputs}"))
    assert mheads(*words, *override, "optim.iterations=2", "-f", "run").code == 0
    assert package.load("run").data.problem.name == problem


def places(pages, pattern):
    """What the pattern finds on each page, with the page."""
    return [(page, found) for page in pages for found in re.findall(pattern, page.read_text())]


def test_links_between_pages_lead_somewhere():
    for page, target in places(TEXTS, r"\]\((?!https?:)([^)\s]+)\)"):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{page.name}: {target}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"^\d+\. \[(\w+\.md)\]\(\1\)", index, re.MULTILINE))


def test_files_that_pages_name_with_their_folder_exist():
    for page, name in places(TEXTS, r"`((?:\w+/)+\w+\.(?:py|yaml|html|css|js))`"):
        assert any((root / name).is_file() for root in (ROOT, ROOT / "mheads")), f"{page.name}: {name}"


def test_the_tables_of_results_are_those_of_the_files():
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    for table in tables["TABLES"]:
        page = table.page.read_text()
        assert page == tables["fill"](page, table), "run python docs/tables.py"
    readme, paper, fifth, forest = map(tables["make"], tables["TABLES"])
    assert "80.91 ± 0.25 (80.72" in readme and "80.91 ± 0.25 (80.72" in paper
    assert "not run" not in readme and len(paper.splitlines()) > len(readme.splitlines()) - 1
    assert "not run" not in paper and "\n\nNot run: " not in readme
    assert "classical MCL" in fifth and "91.83" not in fifth  # the paper's figures are of all iterations
    assert "| one network, 16 epochs | 3 | 2.0 | 1.0 | 93.10 ± 0.08" in forest


def test_the_tables_by_data_set_are_those_of_the_files():
    tables = runpy.run_path(str(ROOT / "docs/tables_by_data_set.py"))
    for path, page in tables["PAGES"].items():
        text = (ROOT / path).read_text()
        for name, metrics in page.tables.items():
            table = tables["make"](page, metrics)
            assert table.count("\n") > 4 and f"<!-- {name} -->\n\n{table}\n\n" in text, f"{path}, {name}: run it"


def test_every_network_by_name_is_listed_with_its_arguments_and_defaults():
    page = (ROOT / "docs/networks.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (`.*) \|$", page, re.MULTILINE))
    assert set(listed) == set(NETWORKS)
    for name, factory in NETWORKS.items():
        arguments = inspect.signature(factory).parameters
        said = dict(re.findall(r"`(\w+)`(?: (\[.*?\]|[^,`:]*))?(?=,|:|$)", listed[name]))
        assert list(said) == list(arguments), name
        for key, default in said.items():
            if default:
                expected = arguments[key].default
                assert yaml.safe_load(default) == (list(expected) if isinstance(expected, tuple) else expected)


def test_every_key_of_a_config_is_listed_with_its_default():
    page = (ROOT / "docs/configuration.md").read_text()
    listed = dict(re.findall(r"^\| `([\w.]+)` \| [^|]+ \| `([^|]*)` \|", page, re.MULTILINE))
    defaults = schema.flatten(schema.Config())
    assert set(listed) == set(defaults)
    for key, said in listed.items():
        default = float(said) if isinstance(defaults[key], float) else yaml.safe_load(said)  # YAML has no 1e-08
        assert default == defaults[key], key


def test_every_name_of_the_package_is_listed():
    table = (ROOT / "docs/python.md").read_text().partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert listed == {name for name in package.__all__ if name != "__version__"}


def test_the_commands_of_the_readme_train_and_measure_a_useful_ensemble(tmp_path, mheads):
    section = (ROOT / "README.md").read_text().partition("\n## On the command line\n")[2].partition("\n\n[")[0]
    train, evaluate, report = (shlex.split(line, comments=True)[1:] for line in section.strip().splitlines())
    folder = str(tmp_path / "mine")
    train, evaluate, report = (
        [word.replace("runs/mine", folder) for word in line] for line in (train, evaluate, report)
    )
    assert mheads(*train).code == 0
    assert json.loads((tmp_path / "mine/result.json").read_text())["ensemble_mean"] > 95
    assert "Ensemble-Mean" in mheads(*evaluate).out
    assert mheads(*report).code == 0 and (tmp_path / "mine/report.html").is_file()


def test_one_answer_prints_its_table(capsys):
    example = runpy.run_path(str(ROOT / "examples/one_answer.py"), run_name="example")
    for name in ("independent", "MCL, k=2"):  # the others take as long
        del example["main"].__globals__["LOSSES"][name]
    example["main"](seeds=1, iterations=5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(example["LOSSES"])
    numbers = [[float(cell) for cell in line.strip("| ").split(" | ")[1:]] for line in lines[2:]]
    assert all(row[-1] >= max(row[0], row[1]) for row in numbers)  # nobody beats the Oracle


def test_two_answers_are_shared_out_and_drawn(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples/two_answers.py"), run_name="example")
    ratio = example["main"](iterations=100, picture=tmp_path / "two.png")
    assert ratio > 10  # the better of two members is so many times nearer than one network
    assert f"{ratio:.1f} times less" in capsys.readouterr().out
    assert imread(tmp_path / "two.png").std() > 0.05  # something is drawn


def test_thresholds_of_one_network_are_a_list_of_masks(mheads, tmp_path, capsys):
    folder = tmp_path / "alone"
    mheads(
        "train", "ambiguous_masks", "members=1", "split=null", "loss=independent", "optim.iterations=60", "-f", folder
    )
    example = runpy.run_path(str(ROOT / "examples/masks_by_threshold.py"), run_name="example")
    example["main"]([str(folder)])
    oracle = float(capsys.readouterr().out.split()[-2])
    alone = package.load(folder).result.oracle
    assert alone + 5 < oracle < 100
    example["main"].__globals__["MASKS"] = 1  # the level 1/2 alone: the answer itself
    assert example["oracle_of_thresholds"](package.load(folder)) == pytest.approx(alone, abs=0.01)


def test_dead_members_are_counted(capsys):
    example = runpy.run_path(str(ROOT / "examples/dead_members.py"), run_name="example")
    names = example["main"].__globals__
    names["WAYS"] = {way: names["WAYS"][way] for way in ("mcl", "annealed")}
    names["SETS"] = {"three futures, M=6": names["SETS"]["three futures, M=6"]}
    dead = example["main"](iterations=60, seeds=1)
    assert dead["mcl"] == 5 > dead["annealed"]  # whoever comes near first wins everything
    assert capsys.readouterr().out.splitlines()[1].split("mcl")[1].strip().startswith("5 of 6, ")


def test_the_drawing_of_gradients_is_what_its_script_draws(tmp_path):
    script = runpy.run_path(str(ROOT / "docs/draw_gradients.py"), run_name="script")
    kept = imread(script["PICTURE"])
    script["main"].__globals__["PICTURE"] = tmp_path / "gradients.png"
    script["main"]()
    drawn = imread(tmp_path / "gradients.png")
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 0.02  # another version of matplotlib may set letters otherwise
