import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.train_draft import evaluate, models, tokens
from examples.train_draft.models import Shape

SHAPE = Shape(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=300, max_positions=64)


def trained_like(model):
    """Random values also where a new model has zeros."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_growing_keeps_the_function_and_names_old_parameters():
    model = trained_like(models.build(SHAPE, seed=0))
    grown, old_names = models.grow(model, 6)
    rows = torch.randint(300, (2, 12))
    assert grown.config.num_hidden_layers == 6
    torch.testing.assert_close(grown(rows).logits, model(rows).logits, rtol=0, atol=1e-5)
    assert old_names["model.layers.3.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    assert "model.layers.4.mlp.up_proj.weight" not in old_names
    assert set(old_names.values()) == set(model.state_dict())


def test_a_grown_layer_learns_at_once():
    grown, _ = models.grow(trained_like(models.build(SHAPE, seed=0)), 4)
    rows = torch.randint(300, (2, 12))
    torch.autograd.backward(grown(rows, labels=rows).loss)
    assert grown.model.layers[1].mlp.down_proj.weight.grad.abs().sum() > 0


def test_growing_to_no_multiple_is_refused():
    with pytest.raises(ValueError, match="multiple of 2"):
        models.grow(models.build(SHAPE, seed=0), 5)


def test_the_export_loads_in_transformers(tmp_path):
    tokenizer = tokens.train_tokenizer(["def f(x):\n    return x\n"] * 5, vocab_size=300)
    model = trained_like(models.build(SHAPE, seed=0))
    models.export(model, tokenizer, tmp_path, chat_template="{{ bos_token }}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), model.to(torch.bfloat16).state_dict())
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n        return 'ü'\n"
    assert again.decode(again(text)["input_ids"]) == text
    assert again.eos_token_id == tokens.END_ID
    assert again.chat_template == "{{ bos_token }}"


def test_the_pair_keeps_its_bounds():
    target, draft = (models.num_parameters(models.build(shape, 0)) for shape in (models.TARGET, models.DRAFT))
    assert target >= 11_000_000
    assert models.TARGET.num_layers >= 8
    assert draft <= target / 8
    assert models.DRAFT.num_layers <= 2
    assert 2 * (target + draft) <= 32_000_000
    assert 2 * models.num_parameters(models.build(models.HYBRID, 0)) <= 9_000_000


def test_agreement_of_a_model_with_itself_is_full():
    logits, noise = torch.randn(50, 20), torch.randn(50, 20)
    for temperature in (0.0, 0.6, 1.0):
        ranks, overlaps = evaluate.agreement(logits, logits, noise, temperature)
        assert ranks.tolist() == [0] * 50
        torch.testing.assert_close(overlaps, torch.ones(50))


def test_agreement_by_hand():
    target_logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]))
    draft_logits = torch.log(torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]))
    ranks, overlaps = evaluate.agreement(target_logits, draft_logits, torch.zeros(2, 3), 1.0)
    assert ranks.tolist() == [2, 0]
    torch.testing.assert_close(overlaps, torch.tensor([0.7, 0.9]))
    ranks, overlaps = evaluate.agreement(target_logits, draft_logits, torch.full((2, 3), 9.0), 0.0)
    assert overlaps.tolist() == [0.0, 1.0]
    noise = torch.tensor([[0.0, 0.0, 5.0], [5.0, 0.0, 0.0]])
    assert evaluate.agreement(target_logits, draft_logits, noise, 1.0)[0].tolist() == [0, 0]


def test_the_hybrid_is_exported_as_transformers_loads_it(tmp_path):
    shape = models.HybridShape(num_layers=4, hidden_size=32, intermediate_size=48, num_heads=2, vocab_size=300)
    model = trained_like(models.build(shape, seed=0)).to(torch.bfloat16).float()
    tokenizer = tokens.train_tokenizer(["def f():\n    return 1\n"] * 3, 300)
    models.export(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    rows = torch.randint(300, (2, 12))
    torch.testing.assert_close(loaded(rows).logits, model(rows).logits, rtol=0, atol=1e-4)
