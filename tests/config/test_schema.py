import re

import pytest
import torch
import yaml

from mheads.cli.printing.recipes import annotate
from mheads.common.errors import UserError
from mheads.config import aliases, schema, unknown_keys
from mheads.config import read as configs
from mheads.config.schema import Config
from mheads.networks import NETWORKS
from mheads.optim.schedules import ScheduleOptions


@pytest.mark.parametrize("name", configs.recipes())
def test_every_recipe_is_a_valid_config(name):
    assert isinstance(configs.load(name), Config)


def test_the_papers_recipe_of_cifar10_quick_is_as_published():
    config = configs.load("cifar10_quick")
    optim = config.optim
    assert (optim.lr, optim.momentum, optim.weight_decay, optim.batch_size, optim.iterations) == (
        0.001, 0.9, 0.004, 350, 5000,
    )  # fmt: skip
    assert optim.caffe_momentum
    assert optim.schedule.at == [4000]


@pytest.mark.parametrize("name", ["caffenet", "caffenet_small", "nin_ilsvrc", "nin_small"])
def test_crops_of_photos_fit_the_network(name):
    config = configs.load(name)
    with torch.device("meta"):
        logits = NETWORKS[config.model](**config.model_args).eval()(
            torch.empty(2, 3, config.data.crop, config.data.crop)
        )
    assert logits.shape == (2, config.model_args.get("classes", 1000))


def test_overrides_reach_nested_keys_and_short_forms():
    config = configs.load("digits", ["loss=mcl", "loss.k=2", "optim.schedule=cosine", "optim.lr=1e-3", "split=conv1"])
    assert (config.loss.name, config.loss.k, config.optim.schedule.name) == ("mcl", 2, "cosine")
    assert config.optim.lr == 0.001
    assert config.split == "conv1"


def test_a_tree_can_be_given_on_the_command_line():
    assert configs.load("digits", ["split={conv1: [{conv2: 2}, 2]}"]).split == {"conv1": [{"conv2": 2}, 2]}


def test_the_resolved_config_reads_back_as_itself(tmp_path):
    config = configs.load("digits", ["loss=mcl", "split={conv1: [2, {ip1: 2}]}", "optim.schedule=plateau"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert configs.read(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("key", schema.PATHS)
def test_a_path_may_begin_with_the_home_folder(key, tmp_path, monkeypatch):
    """A shell does not expand `init=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    needs = {"sampling.path": ["sampling.name=file"], "sampling.generalist": ["sampling.name=clustered"]}.get(key, [])
    file = "x.npz"  # which data.regions.proposals may be, too
    assert str(schema.flatten(configs.load("digits", [*needs, f"{key}=~/{file}"]))[key]) == str(tmp_path / file)
    unknown = schema.flatten(configs.load("digits", [*needs, f"{key}=~nobody-of-this-name/{file}"]))[key]
    assert str(unknown).endswith(f"/~nobody-of-this-name/{file}")


def test_the_digest_ignores_only_what_decides_no_bit_of_the_result():
    digest = configs.load("digits").digest()
    free = ["engine.workers=1", "log.every=3", "timeout=5", "placement=auto"]
    assert configs.load("digits", free).digest() == digest
    for decisive in ("seed=1", "optim.iterations=7", "optim.lr=0.5"):
        assert configs.load("digits", [decisive]).digest() != digest


@pytest.mark.parametrize("name", ["independent", "score_averaged", "prob_averaged", "mcl"])
def test_the_loss_of_a_folder_that_exists_is_read_as_it_was_written(name, tmp_path):
    """These keys are in every folder, whatever its loss, and decide its name and whether it may be resumed."""
    written = {"name": name, "args": {}, "k": 2, "ce_weight": 0.5, "stable": False, "scale_rate": True}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"loss": written}))
    found = schema.flatten(configs.read(tmp_path / "config.yaml"))
    assert {key: found[f"loss.{key}"] for key in written} == written
    defaults = {"args": {}, "k": 1, "ce_weight": 0.0, "stable": True, "scale_rate": True}
    found = schema.flatten(configs.load("digits", [f"loss={name}"]))
    assert {key: found[f"loss.{key}"] for key in defaults} == defaults


@pytest.mark.parametrize("name", configs.recipes())
def test_a_config_with_descriptions_reads_back_as_itself(name):
    odd = ["split={conv1: [{conv2: 2}, 2]}", "model_args={'a: b': \"two\\nlines # one\", c: [1, {d: null}]}", "seed=3"]
    config = configs.load(name, ["members=4", *odd])
    text = annotate(config)
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    for key in ("the first learning rate", "everything random follows from it", "how many members"):
        assert f"# {key}\n" in f"{text}\n"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("lss.k=1", ["'lss'", "'loss'"]),
        ("loss.kk=1", ["'loss.kk'", "'loss.k'"]),
        ("optim.schedule.evry=3", ["'optim.schedule.evry'", "'optim.schedule.every'"]),
        ("lr=0.1", ["'lr'", "'optim.lr'"]),
        ("epochs=3", ["'epochs'", "optim.iterations", "epochs x examples / optim.batch_size"]),
        ("optim.epochs=3", ["'optim.epochs'", "epochs x examples / optim.batch_size"]),
        ("optimizer=adam", ["'optimizer'", "optim.name: sgd, adamw"]),
        ("optim.optimizer=adam", ["'optim.optimizer'", "optim.name: sgd, adamw"]),
        ("learning_rate=3", ["optim.lr"]),
        ("optim.learning-rate=3", ["optim.lr"]),
        ("lr_schedule=cosine", ["optim.schedule.name", "cosine"]),
        ("batch=3", ["optim.batch_size"]),
        ("num_members=3", ["it is members"]),
        ("heads=3", ["it is members"]),
        ("dataset=cifar10", ["data.name"]),
        ("weight_decay=1", ["'optim.weight_decay'"]),
        ("dropout=0.5", ["model_args", "layer"]),
        ("optim.lr=fast", ["optim.lr", "'fast'", "number"]),
        ("optim.lr=-1", ["optim.lr", "-1", "greater than 0"]),
        ("optim.lr=.inf", ["optim.lr", "inf", "finite"]),
        ("members=two", ["members", "'two'", "integer"]),
        ("members=0", ["members = 0", "1"]),
        ("members=1000000000", ["members = 1000000000", "10000"]),
        ("loss={name: mcl, k: 0}", ["loss.k = 0", "greater than or equal to 1"]),
        ("loss.k=two", ["loss.k = 'two'", "integer"]),
        ("loss.ce_weight=-1e-3", ["loss.ce_weight = -0.001", "greater than or equal to 0"]),
        ("loss.stable=maybe", ["loss.stable = 'maybe'", "boolean"]),
        ("loss=mse", ["loss.name = 'mse': it is a base loss", "give loss.base_loss=mse"]),
        ("loss=mcll", ["'mcll'", "mcl", "package.module:factory"]),
        ("engine.workers=two", ["engine.workers = 'two'", "'auto'", "integer"]),
        ("optim=3", ["optim = 3", "optim.lr"]),
        ("split=true", ["split = True", "layer"]),
        ("data.mirror=7", ["data.mirror = 7", "boolean"]),
        ("eval.views=[{}, {weight: -1}]", ["eval.views.1.weight = -1", "greater than 0"]),
        ("eval.views=[{wieght: 1}]", ["'eval.views.0.wieght'", "there are eval.views.0.weight, "]),
        ("eval.views=[mirror]", ["eval.views.0 = 'mirror'", "eval.views.0.weight, eval.views.0.mirror"]),
        ("optim.parameter_groups={ip1: {lr: 0}}", ["optim.parameter_groups.ip1.lr = 0", "greater than 0"]),
        ("optim.parameter_groups={ip1.bias: {lr: 0}}", ["optim.parameter_groups.ip1.bias.lr = 0", "greater than 0"]),
        ("optim.parameter_groups={ip1: {rate: 1}}", ["groups.ip1.rate'", "there are optim.parameter_groups.ip1.lr"]),
        ("loss.k", ["'loss.k'", "key=value"]),
        ("loss.k=[", ["'loss.k=['", "YAML"]),
        ("sampling={name: specialists, groups: [[0], [1]]}", ["2 groups", "4 members"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_remedy(override, parts):
    with pytest.raises(UserError) as caught:
        configs.load("digits", [override])
    for part in parts:
        assert part in str(caught.value)


def test_one_mistake_is_one_line():
    with pytest.raises(UserError) as caught:
        configs.load("digits", ["engine.workers=0"])
    assert len(str(caught.value).splitlines()) == 1


def test_all_mistakes_are_named_at_once():
    with pytest.raises(UserError) as caught:
        configs.load("digits", ["optim.lr=fast", "seed=-1", "sed=1"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"optim: {iteration: 5}", "'optim.iteration'; did you mean 'optim.iterations'"),
        (b"loss: {name: mcl", "not valid YAML"),
        (b"- a\n- b", "mapping"),
        (b"\xba\xff", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        configs.load(str(path))
    assert str(path) in str(caught.value)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match=r"'digts'.*did you mean digits"):
        configs.load("digts")


def test_every_hint_by_meaning_names_what_there_is():
    names = {part for key in schema.all_keys() for part in (key, key.split(".")[0])}
    for name, meant in unknown_keys.MEANINGS.items():
        assert not any(key.rsplit(".", 1)[-1] == name for key in schema.all_keys()), f"{name} is a key"
        first = re.match(r"[a-z_.]+", meant)[0]
        assert first in names or meant.startswith(("the option --folder", "model_args."))


def test_an_override_of_a_section_changes_only_what_it_names():
    plain, changed = configs.load("digits"), configs.load("digits", ["optim={lr: 0.1}"])
    assert changed.optim == plain.optim.model_copy(update={"lr": 0.1})
    another = configs.load("digits", ["optim.schedule={name: cosine}"])
    assert another.optim.schedule == ScheduleOptions(name="cosine")  # nothing of the multistep is left
    assert configs.load("digits", ["data={name: npz, path: x.npz}"]).data.normalize == "none"


def test_of_a_key_given_twice_the_last_counts():
    assert configs.load("digits", ["optim.lr=0.1", "optim.lr=0.2"]).optim.lr == 0.2


def test_a_run_folder_in_place_of_a_recipe_is_told_from_a_name_that_is_not_known(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {name: digits}\n")
    with pytest.raises(UserError, match=r"is the folder of a run: give .*config\.yaml for a new run"):
        configs.load(str(tmp_path))


def test_a_key_that_is_gone_is_read_in_files_and_refused_on_the_command_line(tmp_path):
    (tmp_path / "old.yaml").write_text("data: {reader: lead, name: digits}\n")
    assert configs.load(str(tmp_path / "old.yaml")).data.name == "digits"
    with pytest.raises(UserError, match=r"unknown key 'data\.reader'"):
        configs.load("digits", ["data.reader=lead"])


def test_another_name_of_a_key_is_accepted_wherever_a_config_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(aliases.ALIASES, "optim.learning_speed", "optim.lr")
    monkeypatch.setitem(aliases.ALIASES, "journal", "log")
    expected = configs.load("digits", ["optim.lr=0.5", "log.every=7"])
    for overrides in (
        ["optim.learning_speed=0.5", "journal.every=7"],
        ["optim={learning_speed: 0.5}", "journal={every: 7}"],
    ):
        assert configs.load("digits", overrides) == expected
        assert [key for given in overrides for key in configs.keys_of(given)] == ["optim.lr", "log.every"]
    (tmp_path / "mine.yaml").write_text("optim: {learning_speed: 0.5}\njournal: {every: 7}\n")
    config = configs.load(str(tmp_path / "mine.yaml"))
    assert (config.optim.lr, config.log.every) == (0.5, 7)
    assert "learning_speed" not in config.to_yaml()  # written under the name of the schema
    assert configs.load(str(tmp_path / "mine.yaml"), ["optim.lr=0.25"]).optim.lr == 0.25
    (tmp_path / "mine.yaml").write_text("optim: {learning_speed: 0.5, lr: 0.1}\n")
    with pytest.raises(UserError, match=r"mine.yaml: optim.lr is there under two names"):
        configs.load(str(tmp_path / "mine.yaml"))
