"""Value heads of a policy: a linear layer on top of its decoder, or a separate critic."""

from __future__ import annotations

from typing import Any

from torch import nn

# Prefix of the names of a value head's weights in the state of a policy.
VALUE_HEAD_PREFIX = "value_head."


class ValueHead(nn.Linear):
    """Linear layer that maps hidden states to values (expected returns), initialized to zero."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Critic(nn.Module):
    """Separate value model: a copy of the policy's decoder (`trunk`) with a value head (`head`).

    It shares no weights with the policy, so the value loss does not affect the policy.
    """

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(width)
