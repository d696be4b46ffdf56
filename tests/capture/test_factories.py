"""Finding and calling factories: the forms that work, and a diagnostic for each one that does not."""

from pathlib import Path

import pytest
import torch
from torch import nn

from compiler.capture import capture
from runtime.factory import FactoryError, build, resolve
from tests.capture.support import request_of
from tests.capture.test_bad_models import check, failure

HERE = Path(__file__).parent
FILES = HERE / "bad" / "files"
LLAMA = dict(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
AUTO = "transformers:AutoModelForCausalLM.from_config"
TOKENS = {"input_ids": ("int64", (2, 8)), "labels": ("int64", (2, 8))}

# factory, options, expected pieces
BAD_FACTORIES = [
    ("no_such_package:Net", {}, "E100 | there is no module `no_such_package`"),
    ("transfomers:Net", {}, "E100 | there is no module `transfomers` | did you mean `transformers`?"),
    ("tests.no_such_module:Net", {}, "E100 | `tests` has no part called `no_such_module`"),
    ("tests.captur:Net", {}, "E100 | did you mean `capture`?"),
    ("tests.capture.bad.models", {}, 'E100 | it has no `:` | "package.module:Name"'),
    ("tests.capture.bad.models:", {}, "E100 | it has no `:`"),
    ("not a module:Net", {}, "E100 | is no module name"),
    (":Net", {}, "E100"),
    ("tests.capture.bad.models:Bass", {}, "E100 | has no `Bass` | did you mean `Base`?"),
    ("dsl_examples.models.llama:Llama.build", {}, "E100 | `Llama` has no `build`"),
    ("good.py:WIDTH", {}, "E100 | cannot be called | a Tensor"),
    ("goood.py:Net", {}, "E100 | does not exist | did you mean `good.py`?"),
    ("nowhere/good.py:Net", {}, "E100 | the folder"),
    ("broken_syntax.py:build", {}, "E100 | SyntaxError | broken_syntax.py:1"),
    ("broken_import.py:build", {}, "E100 | ModuleNotFoundError | broken_import.py:1"),
    ("broken_top.py:build", {}, "E100 | ValueError | broken_top.py:1"),
    ("good.py:Net", {}, "E101 | needs `width` | add `width = …`"),
    ("good.py:Net", {"widht": 4}, "E101 | has no option `widht` | did you mean `width`?"),
    ("good.py:Net", {"width": 4, "layers": 2}, "E101 | has no option `layers` | it takes `width`, `depth`"),
    ("good.py:Net", {"width": 3}, "E102 | ValueError: width must be even, not 3 | good.py:12"),
    ("good.py:Net", {"width": "8"}, "E102 | TypeError | good.py:11"),
    ("good.py:Net", {"width": 4, "depth": 1.5}, "E102 | TypeError | good.py:13"),
    ("good.py:any_options", {"width": 4, "dept": 1}, "E102 | TypeError | dept | good.py:40"),
    ("good.py:number", {}, "E102 | is not a model factory | it returned 3"),
    ("good.py:nothing", {}, "E102 | it returned None"),
    ("good.py:loss", {"outputs": 1, "batch": 2}, "E102"),
    ("torch:rand", {}, "E10"),
    (AUTO, LLAMA | {"config": "LlamaConfg"}, "E101 | has no configuration `LlamaConfg` | did you mean `LlamaConfig`?"),
    (AUTO, LLAMA | {"config": "LlamaConfig", "num_hidden_layer": 2}, "E101 | `LlamaConfig` has no option `num_hidden_layer` | did you mean `num_hidden_layers`?"),
    (AUTO, LLAMA | {"config": "LlamaConfig", "hidden_size": "16"}, "E102"),
    (AUTO, LLAMA | {"config": "LlamaConfig", "attn_implementation": "flash"}, "E102"),
    (AUTO, {}, "E102 | config"),
    ("transformers:AutoModelForCausalML.from_config", {"config": "LlamaConfig"}, "E100 | did you mean `AutoModelForCausalLM`?"),
]  # fmt: skip


@pytest.mark.parametrize("factory, options, expected", BAD_FACTORIES)
def test_bad_factory(factory, options, expected):
    if "transformers" in factory:
        pytest.importorskip("transformers")
    check(failure(factory, options=options, base=str(FILES)), expected)


BAD_LOSSES = [
    (("good.py:los", {}), "E100 | did you mean `loss`?"),
    (("good.py:loss", {"scal": 2.0}), "E103 | scal | function(outputs, batch, **options)"),
    (("good.py:loss_of_one", {}), "E103 | loss_of_one | function(outputs, batch, **options)"),
    (("good.py:loss_of_wrong_key", {}), "E110 | KeyError | good.py:63"),
    (("good.py:loss_of_each", {}), "E104 | the loss is not a single number | the `loss` function returned float32[6, 4]"),
    (("torch.nn.functional:mse_loss", {}), "E110"),
]


@pytest.mark.parametrize("loss, expected", BAD_LOSSES)
def test_bad_loss(loss, expected):
    check(failure("good.py:Outputs", base=str(FILES), loss=loss), expected)


BAD_PATTERNS = [
    ({"freeze": ("layer",)}, 'E106 | `freeze` names nothing in the model: "layer" | did you mean `layers`?'),
    ({"opaque": ("layers.9",)}, 'E106 | `opaque` names nothing in the model: "layers.9"'),
    ({"opaque": ("head.weight",)}, "E106"),
    ({"freeze": ("*",)}, "E105 | the plan freezes every parameter"),
]


@pytest.mark.parametrize("more, expected", BAD_PATTERNS)
def test_bad_pattern(more, expected):
    check(failure("good.py:Net", base=str(FILES), options={"width": 4}, **more), expected)


def test_misspelled_input_of_hugging_face():
    pytest.importorskip("transformers")
    inputs = {"input_ids": ("int64", (2, 8)), "lables": ("int64", (2, 8))}
    check(failure(AUTO, inputs, options=LLAMA | {"config": "LlamaConfig"}), "E104 | `lables`: did you mean `labels`?")
    check(failure(AUTO, {"input_ids": ("int64", (2, 8))}, options=LLAMA | {"config": "LlamaConfig"}), "E104 | `labels`")


# -- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory, options",
    [
        ("tests.capture.bad.models:Base", {}),
        ("good.py:Net", {"width": 4}),
        (f"{FILES}/good.py:Net", {"width": 4, "depth": 2}),
        ("good:Net", {"width": 4}),
        ("good.py:any_options", {"width": 4}),
        ("dsl_examples.models.mlp:MLP", {"activations": ("relu",)}),
    ],
)
def test_good_factory(factory, options):
    assert isinstance(build(factory, options, str(FILES)), nn.Module)


def test_configuration_defaults():
    transformers = pytest.importorskip("transformers")
    model = build(AUTO, LLAMA | {"config": "LlamaConfig"})
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.config.use_cache is False and model.config._attn_implementation == "sdpa"
    assert build(AUTO, LLAMA | {"config": "LlamaConfig", "use_cache": True}).config.use_cache is True


def test_own_option_called_config(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(config, width=2):\n    assert config == 'small'\n    return nn.Linear(width, width)\n"
    )
    assert build("mine.py:make", {"config": "small", "width": 3}, str(tmp_path)).in_features == 3


def test_edited_file_is_loaded_anew(tmp_path):
    import os

    file = tmp_path / "edited.py"
    file.write_text("value = 1\ndef get(): return value\n")
    assert resolve("edited.py:get", str(tmp_path))() == 1
    file.write_text("value = 2\ndef get(): return value\n")
    os.utime(file, ns=(1, 1))
    assert resolve("edited.py:get", str(tmp_path))() == 2


def test_plain_tensors_get_names():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.table = torch.arange(3.0)
            self.view = self.layer.weight.data

    import sys

    sys.modules[__name__].Plain = Plain
    model = build(f"{__name__}:Plain", {})
    assert dict(model.named_buffers()).keys() == {"table"}
    assert "table" not in model.state_dict()
    assert model.view.data_ptr() == model.layer.weight.data_ptr()


def test_constructor_that_reads_values_is_built_for_real():
    captured = capture(request_of("good.py:checks_weights", {"x": torch.zeros(6, 4), "y": torch.zeros(6, 4)}, base=str(FILES)))
    assert captured.graph.outputs["loss"].differentiable


def test_loss_function():
    batch = {"x": torch.zeros(6, 4), "y": torch.zeros(6, 4)}
    one = capture(request_of("good.py:Outputs", batch, base=str(FILES), loss=("good.py:loss", {"scale": 2.0})))
    assert list(one.graph.outputs) == ["loss"]
    two = capture(request_of("good.py:Outputs", batch, base=str(FILES), loss=("good.py:loss_with_metric", {})))
    assert list(two.graph.outputs) == ["loss", "metric:mean"]


def test_modules_are_imported_with_real_tensors(tmp_path):
    (tmp_path / "lazy_part.py").write_text("import torch\nTABLE = torch.arange(4.0)\n")
    (tmp_path / "lazy_main.py").write_text(
        "import torch\nfrom torch import nn\nTABLE = torch.ones(4)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "    def forward(self, x):\n"
        "        from lazy_part import TABLE as more\n"
        "        return (super().forward(x) * TABLE * more).mean()\n"
    )
    captured = capture(request_of("lazy_main:Net", {"x": torch.zeros(2, 4)}, base=str(tmp_path), dtype="float64"))
    import lazy_main
    import lazy_part

    for table in (lazy_main.TABLE, lazy_part.TABLE):
        assert type(table) is torch.Tensor and table.dtype == torch.float32
    assert [tuple(t.shape) for t in captured.constants.values()] == [(4,), (4,)]


def test_error_text():
    with pytest.raises(FactoryError) as caught:
        build("good.py:Net", {"widht": 4}, str(FILES))
    assert str(caught.value) == "`good.py:Net` has no option `widht`: it takes `width`, `depth`; did you mean `width`?"
