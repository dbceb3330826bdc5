import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.train_draft import __main__ as cli
from examples.train_draft import checkpoints, tokens
from examples.train_draft.corpus import Document


@pytest.mark.whole
def test_the_commands_make_a_pair_and_its_figures(tmp_path, caplog):
    caplog.set_level("INFO")
    code = "".join(f"def name_{i}(x):\n    return x + {i}\n\n\n" for i in range(40))
    documents = [Document("package", f"m{i}.py", code.replace("name", f"name_{i}")) for i in range(30)]
    tokenizer = AutoTokenizer.from_pretrained(cli.DEMO / "target")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokens.write_tokens(documents, tokenizer, tmp_path)

    def run(command):
        cli.main(["--work", str(tmp_path), *command.split()])

    small = "--window-tokens 80 --batch-size 4"
    run(f"target --stages 1:1,2:2 {small}")
    run(f"target --stages 1:1,2:3 {small} --decay-steps 1 --start-from target --name final")
    run(f"draft --target final --steps 1 {small}")
    run("samples --target final --num-windows 32 --window-tokens 80")
    run(f"draft --target final --steps 2 {small}")
    run(f"mutual --target final --draft draft --steps 1 {small}")
    run(f"hybrid --steps 1 {small}")
    run("export --target mutual-target --draft mutual-draft")
    run("export --hybrid hybrid")
    run(f"evaluate --pair {tmp_path}/pair --num-windows 1")

    steps = {
        name: checkpoints.load(tmp_path / f"{name}.pt").step for name in ("target", "final", "draft", "mutual-draft")
    }
    assert steps == {"target": 2, "final": 3, "draft": 2, "mutual-draft": 1}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "target").config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "pair" / "draft").chat_template
    figures = json.loads(caplog.messages[-1].split("\n|")[0])
    assert len(figures["agreements"]) == 6
    assert figures["draft_parameters"] == 1_352_480
    run(f"evaluate --pair {tmp_path}/pair --target hybrid --num-windows 1")
    assert json.loads(caplog.messages[-1].split("\n|")[0])["target_parameters"] == 4_078_168
    with pytest.raises(SystemExit, match="--target, --draft, --hybrid"):
        run("export")


def test_a_copy_to_start_from_that_is_cut_off_is_made_anew(tmp_path, monkeypatch):
    def half_a_copy(source, path):
        path.write_bytes(source.read_bytes()[:3])
        raise OSError("no space left")

    (tmp_path / "target.pt").write_bytes(b"a checkpoint")
    options = cli.build_parser().parse_args(f"--work {tmp_path} target --start-from target --name final".split())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half_a_copy)
        with pytest.raises(OSError, match="no space left"):
            cli._path(options, "target")
    assert not (tmp_path / "final.pt").exists()
    assert cli._path(options, "target").read_bytes() == b"a checkpoint"


def test_the_recipe_is_of_commands_that_exist(tmp_path):
    for command in cli.RECIPE:
        options = cli.build_parser().parse_args(["--work", str(tmp_path), *command.format(work=tmp_path).split()])
        assert callable(options.run)
