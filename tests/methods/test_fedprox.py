from unittest.mock import patch

import torch


def test_one_step_moves_by_eta_mu_delta(make_method, make_client, task):
    # The spring's gradient at w_t + δ is μ·δ: with no gradient of the task one step moves by -η·μ·δ.
    eta, mu, delta = 0.1, 0.5, 0.25
    method = make_method("fedprox", own={"mu": mu})
    client = make_client(architecture="cnn4", labels=(0,) * 4, learning_rate=eta, batch_size=4)
    received = method.init(task, 0)
    method.install(client, received)
    with torch.no_grad():
        for parameter in client.model.parameters():
            parameter.add_(delta)
    with patch.object(torch.nn.functional, "cross_entropy", lambda logits, labels: logits.sum() * 0):
        method.train(client, received)
    for name, parameter in client.model.named_parameters():
        expected = received.tensors[name] + delta - eta * mu * delta
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-6, rtol=0)
