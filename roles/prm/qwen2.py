"""The architecture of Qwen2.5-Math-PRM, whose code comes with its weights rather than with transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):  # type: ignore[misc]
    """Two linear layers on the last hidden states: [rows, tokens, 2], bad and good. See arXiv:2501.07301."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = 2
        self.model = Qwen2Model(config)
        self.score = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size), nn.ReLU(), nn.Linear(config.hidden_size, 2)
        )
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> TokenClassifierOutput:
        """Logits of each token."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return TokenClassifierOutput(logits=self.score(states))
