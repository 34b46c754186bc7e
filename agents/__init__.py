"""Players: shown a turn, they decide."""

from agents.base import (
    THOUGHT,
    Agent,
    AgentContext,
    Attempt,
    Decision,
    Fault,
    Interrupted,
    Seat,
    Turn,
)
from agents.baseline import GreedyAgent, RandomAgent
from agents.config import (
    AGENT_KINDS,
    AgentConfig,
    AgentKind,
    GreedyConfig,
    LlmConfig,
    OwnAgentConfig,
    RandomConfig,
    UciConfig,
    build_agent,
    check_agent,
    parse_agent_config,
)
from agents.judge import judge_choice, judge_free, judge_thought
from agents.llm import LlmAgent, LlmSettings, cannot_think, charged_seconds, sampling_seed
from agents.parse import PARSER_VERSION, Answer, Failure, read_answer, read_move
from agents.prompt import PROMPT_VERSION, ContextNeed, system_prompt
from agents.uci_agent import UciAgent, from_uci

__all__ = [
    "AGENT_KINDS",
    "PARSER_VERSION",
    "PROMPT_VERSION",
    "THOUGHT",
    "Agent",
    "AgentConfig",
    "AgentContext",
    "AgentKind",
    "Answer",
    "Attempt",
    "ContextNeed",
    "Decision",
    "Failure",
    "Fault",
    "GreedyAgent",
    "GreedyConfig",
    "Interrupted",
    "LlmAgent",
    "LlmConfig",
    "LlmSettings",
    "OwnAgentConfig",
    "RandomAgent",
    "RandomConfig",
    "Seat",
    "Turn",
    "UciAgent",
    "UciConfig",
    "build_agent",
    "cannot_think",
    "charged_seconds",
    "check_agent",
    "from_uci",
    "judge_choice",
    "judge_free",
    "judge_thought",
    "parse_agent_config",
    "read_answer",
    "read_move",
    "sampling_seed",
    "system_prompt",
]
