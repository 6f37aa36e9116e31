import torch

from pbfl_flwr.method import Round
from pbfl_flwr.models.contract import body_names, head_names


def test_fedper_keeps_the_head_and_copies_the_body(make_method, make_client, task):
    method, client = make_method("fedper"), make_client(architecture="cnn4")
    state = method.init(task, 11)
    assert set(state.tensors) == set(body_names(client.model))
    before = {name: p.clone() for name, p in client.model.named_parameters()}
    method.install(client, state)
    for name, parameter in client.model.named_parameters():
        assert torch.equal(parameter, state.tensors[name] if name in state.tensors else before[name])
    update = method.local_update(client, state)
    assert update.payload.num_examples == 8
    assert update.payload.scalars() == state.scalars()
    for name in head_names(client.model):
        assert not torch.equal(dict(client.model.named_parameters())[name], before[name])  # trained jointly
    state_after = method.aggregate(state, {0: update.payload}, Round(1, task, 1))
    for name, tensor in update.payload.tensors.items():
        assert torch.equal(state_after.tensors[name], tensor)  # one client: its body
