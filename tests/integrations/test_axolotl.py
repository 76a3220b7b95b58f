"""The plugin in Axolotl's plugin manager, and the keys of its YAML files."""

import pytest

from tests.integrations.conftest import llama, quietly, same_weights, tokens

(PluginManager,) = quietly("axolotl.integrations.base", "PluginManager")
(DictDefault,) = quietly("axolotl.utils.dict", "DictDefault")
Trainer, TrainingArguments = quietly("transformers", "Trainer", "TrainingArguments")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # its own, and those of its packages
NAME = "actstore.integrations.axolotl.ActivationStorePlugin"


def trained(folder, callbacks):
    model = llama()
    arguments = TrainingArguments(str(folder), max_steps=4, save_strategy="no", report_to=[], use_cpu=True)
    Trainer(model, arguments, train_dataset=tokens(), callbacks=callbacks).train()
    return model


def test_a_policy_in_the_yaml_file(tmp_path):
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert manager.get_input_args() == ["actstore.integrations.axolotl.ActivationStoreArgs"]
    (keys,) = quietly("actstore.integrations.axolotl", "ActivationStoreArgs")
    cfg = DictDefault(keys(actstore_policy="@blocks : recompute(raw @ disk)", actstore_disk=str(tmp_path)).model_dump())
    [callback] = manager.add_callbacks_pre_trainer(cfg, llama())
    stored = trained(tmp_path, [callback])
    assert callback.store.report().held_bytes < 0.5 * callback.store.report().saved_bytes
    assert same_weights(stored, trained(tmp_path, []))
    assert manager.add_callbacks_pre_trainer(DictDefault(keys().model_dump()), llama()) == []
