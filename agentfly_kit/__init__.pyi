from agentfly_kit import advantages as advantages
from agentfly_kit import chat as chat
from agentfly_kit import envs as envs
from agentfly_kit import errors as errors
from agentfly_kit import losses as losses
from agentfly_kit import tiny as tiny
from agentfly_kit import widgets as widgets  # type: ignore[attr-defined]  # its folder is widgets/
from agentfly_kit._doctor import doctor as doctor
from agentfly_kit.agent.agent import Agent as Agent
from agentfly_kit.agent.budget import Budget as Budget
from agentfly_kit.agent.captured import captured as captured
from agentfly_kit.agent.captured import from_tokens as from_tokens
from agentfly_kit.agent.chain_editing import Chain as Chain
from agentfly_kit.agent.rollout import Rollout as Rollout
from agentfly_kit.agent.rollout import RolloutDiff as RolloutDiff
from agentfly_kit.agent.runner import RolloutHandle as RolloutHandle
from agentfly_kit.batch import filters as filters
from agentfly_kit.batch.batch import Batch as Batch
from agentfly_kit.batch.collate import collate as collate
from agentfly_kit.batch.turn_data import turn_data as turn_data
from agentfly_kit.chat.chat import Chat as Chat
from agentfly_kit.endpoint.endpoint import Endpoint as Endpoint
from agentfly_kit.engines.base import Engine as Engine
from agentfly_kit.engines.local.engine import LocalEngine as LocalEngine
from agentfly_kit.engines.openai import OpenAIEngine as OpenAIEngine
from agentfly_kit.engines.scripted import ScriptedEngine as ScriptedEngine
from agentfly_kit.engines.vllm.engine import VLLMEngine as VLLMEngine
from agentfly_kit.errors import RunMismatch as RunMismatch
from agentfly_kit.errors import ToolError as ToolError
from agentfly_kit.evaluation import Evaluation as Evaluation
from agentfly_kit.evaluation import evaluate as evaluate
from agentfly_kit.integrations import trl as trl
from agentfly_kit.integrations.remote_pool.client import RemotePool as RemotePool
from agentfly_kit.integrations.remote_pool.server import serve_pool as serve_pool
from agentfly_kit.policy.policy import Policy as Policy
from agentfly_kit.pool.base import pools as pools
from agentfly_kit.pool.pool import Pool as Pool
from agentfly_kit.ppo import PPOConfig as PPOConfig
from agentfly_kit.ppo import adamw as adamw
from agentfly_kit.ppo import ppo_step as ppo_step
from agentfly_kit.ppo import ppo_step_async as ppo_step_async
from agentfly_kit.ppo import shaped_rewards as shaped_rewards
from agentfly_kit.ppo.stats import Stats as Stats
from agentfly_kit.rewards import Reward as Reward
from agentfly_kit.rewards import Score as Score
from agentfly_kit.rewards import reward as reward
from agentfly_kit.sandboxes import sandbox_report as sandbox_report
from agentfly_kit.sandboxes.files import FileSandbox as FileSandbox
from agentfly_kit.sandboxes.grader import Grader as Grader
from agentfly_kit.sandboxes.host.container import Container as Container
from agentfly_kit.sandboxes.python import PythonSandbox as PythonSandbox
from agentfly_kit.sandboxes.result import SandboxResult as SandboxResult
from agentfly_kit.sandboxes.shell import ShellSandbox as ShellSandbox
from agentfly_kit.sandboxes.sql import SQLResult as SQLResult
from agentfly_kit.sandboxes.sql import SQLSandbox as SQLSandbox
from agentfly_kit.tasks import Tasks as Tasks
from agentfly_kit.tasks import load_tasks as load_tasks
from agentfly_kit.tasks import tasks_from as tasks_from
from agentfly_kit.tools import builtin as _builtin
from agentfly_kit.tools.context import Context as Context
from agentfly_kit.tools.injection import FromPool as FromPool
from agentfly_kit.tools.injection import FromTask as FromTask
from agentfly_kit.tools.tool import Tool as Tool
from agentfly_kit.tools.tool import ToolSet as ToolSet
from agentfly_kit.tools.tool import tool as tool
from agentfly_kit.trainer.config import TrainConfig as TrainConfig
from agentfly_kit.trainer.loop import TrainRun as TrainRun
from agentfly_kit.trainer.loop import TrainStep as TrainStep
from agentfly_kit.trainer.loop import train as train
from agentfly_kit.trainer.run_dir import Run as Run
from agentfly_kit.trainer.runs import runs as runs
from agentfly_kit.types import Failure as Failure
from agentfly_kit.types import Group as Group
from agentfly_kit.types import Row as Row
from agentfly_kit.types import Sample as Sample
from agentfly_kit.types import Sampling as Sampling
from agentfly_kit.types import Task as Task
from agentfly_kit.types import ToolCall as ToolCall
from agentfly_kit.types import ToolResult as ToolResult
from agentfly_kit.types import Trajectory as Trajectory
from agentfly_kit.types import Turn as Turn

toolbox = _builtin

__version__: str
__all__: list[str]

def __dir__() -> list[str]: ...
