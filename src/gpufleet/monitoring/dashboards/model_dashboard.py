"""Define the dashboard of a model and its replicas, from the clients' point of view. Pure."""

from __future__ import annotations

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import JOBS, metric, responses, with_status
from gpufleet.monitoring.dashboards.common import (
    ANY_IS_BAD,
    ANY_IS_TO_LOOK_AT,
    KV_STEPS,
    MODEL,
    STAGE,
    UP,
    YES_IS_BAD,
    heatmap,
    lines,
    stat,
)
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Column,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    Step,
    Unit,
)

_OF = 'model="$model",stage=~"$stage"'
_ANSWERS = responses(_OF)
_ERRORS = responses(_OF, only="5..")
_NOT_2XX = responses(_OF, but="2..")
_RATE = "[$__rate_interval]"
# The colours for a latency as a share of its objective. At 1, the alert fires.
_PROMISE = (Step(None, Colour.GOOD), Step(0.8, Colour.LOOK), Step(1, Colour.BAD))
_QUIET = "no request in this time"
# Models for embeddings, rerank and similar tasks have only values of prompts and whole requests.
_NO_TEXT = "no token generated in this time"
_NO_GATEWAY = "no gateway has this model"
_STALLED = 'gpufleet_watchdog_stalled{stage=~"$stage"}'
_RESTARTS = 'increase(gpufleet_{}_restarts_total{{stage=~"$stage"}}[10m])'


def _quantile(quantile: float, histogram: Measure, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric(histogram, _OF)}{_RATE})))"
    )


def _held(recorded: str, objective: str) -> str:
    """Return a latency as a share of its objective."""
    return f'max({recorded}{{model="$model"}}) / max({objective}{{model="$model"}})'


def _of_this(vector: str) -> str:
    """
    Restrict a vector of stages, which has no label for the model, to the stages of the chosen
    model.
    """
    return f'{vector} and on (instance, stage) gpufleet_stage_info{{model="$model"}}'


def _spread(
    title: str, histogram: Measure, what_to_do: str, objective: str = "", empty: str = _QUIET
) -> Panel:
    """Return a panel of a latency's quantiles over time, with its objective."""
    quantiles = tuple(
        Query(_quantile(quantile, histogram), name)
        for quantile, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )
    promised = (Query(f'max({objective}{{model="$model"}})', "p99 objective", limit=True),)
    return lines(
        title,
        Unit.SECONDS,
        quantiles + (promised if objective else ()),
        what_to_do,
        width=6,
        empty=empty,
    )


NOW = Row(
    "Does the model meet its objectives now?",
    (
        stat(
            "Replicas down",
            f"sum(1 - up{{{JOBS},{_OF}}})",
            "The replicas are listed below. The journal of a replica's unit shows the reason.",
            steps=ANY_IS_BAD,
        ),
        stat(
            "First token, share of the objective",
            _held("model:ttft_seconds:p99_15m", "model:objective_ttft_p99_seconds"),
            "Above 100 %, the first token takes longer than the objective allows. If requests wait, add "
            "replicas. If no request waits, the prompts are long: see the lengths of prompts.",
            unit=Unit.RATIO,
            steps=_PROMISE,
            empty="no objective is set",
        ),
        stat(
            "Next token, share of the objective",
            _held("model:itl_seconds:p99_15m", "model:objective_itl_p99_seconds"),
            "Above 100 %, the time between tokens is longer than the objective allows. Many parallel "
            "requests and long prompts among them increase this time.",
            unit=Unit.RATIO,
            steps=_PROMISE,
            empty="no objective is set",
        ),
        stat(
            "Waiting",
            f"sum({metric(Measure.WAITING, _OF)})",
            "The reasons why requests wait are shown below.",
            steps=(Step(None, Colour.GOOD), Step(10, Colour.LOOK), Step(100, Colour.BAD)),
        ),
        stat(
            "Fullest KV cache",
            f"max({metric(Measure.KV_USE, _OF)})",
            "Above 85 %, requests wait or are preempted.",
            unit=Unit.RATIO,
            steps=KV_STEPS,
        ),
        stat(
            "Server errors",
            f"(sum(rate({_ERRORS}[5m])) or vector(0)) / sum(rate({_ANSWERS}[5m]))",
            "Read the unit's journal for the traceback.",
            unit=Unit.RATIO,
            steps=(Step(None, Colour.GOOD), Step(0.001, Colour.LOOK), Step(0.01, Colour.BAD)),
            empty=_QUIET,
        ),
        stat(
            "Tokens out",
            f"sum(rate({metric(Measure.GENERATED, _OF)}{_RATE}))",
            "If the value is zero while requests run, the engine hangs. Models that do not complete text always show zero.",
            unit=Unit.TOKENS_PER_SECOND,
        ),
        stat(
            "Preempted, 10 min",
            f"sum(increase({metric(Measure.PREEMPTED, _OF)}[10m]))",
            "Each preempted request is computed again. Allow fewer parallel requests (`max_num_seqs`), or more KV "
            "cache.",
            steps=ANY_IS_TO_LOOK_AT,
            decimals=0,
        ),
    ),
)

FELT = Row(
    "What clients measure",
    (
        _spread(
            "Time to the first token",
            Measure.TTFT,
            "Above the dashed line, the objective is not met. Compare this time with the time in the queue on the right.",
            "model:objective_ttft_p99_seconds",
        ),
        _spread(
            "Between two tokens",
            Measure.ITL,
            "Above the dashed line, the objective is not met because too many requests run at once.",
            "model:objective_itl_p99_seconds",
            empty=_NO_TEXT,
        ),
        _spread(
            "A whole request",
            Measure.E2E,
            "This time results from the two times on the left and from the number of generated tokens. "
            "For embeddings and rerank, it is the only relevant latency.",
            "model:objective_e2e_p99_seconds",
        ),
        _spread(
            "Time in the queue",
            Measure.QUEUE_TIME,
            "Requests spend this time in the queue before the model computes them. If it is long, add a replica.",
        ),
    ),
)

LOAD = Row(
    "Load",
    (
        lines(
            "Requests running",
            Unit.COUNT,
            (Query(f"sum by (stage) ({metric(Measure.RUNNING, _OF)})", "{{stage}}"),),
            "If the numbers of the replicas differ much, the gateway does not distribute requests evenly.",
            width=6,
        ),
        lines(
            "Requests waiting, by reason",
            Unit.COUNT,
            (
                Query(
                    f"sum by (stage, reason) ({metric(Measure.WAITING_BY_REASON, _OF)})",
                    "{{stage}} {{reason}}",
                ),
            ),
            "capacity: the KV cache or the batch is full. deferred: the request waits until an adapter "
            "or a KV cache is loaded.",
            width=6,
        ),
        lines(
            "KV cache in use",
            Unit.RATIO,
            (Query(f"max by (stage) ({metric(Measure.KV_USE, _OF)})", "{{stage}}"),),
            "If the value stays above 85 %, add a replica or lower the context length.",
            width=6,
            steps=KV_STEPS,
            maximum=1,
        ),
        lines(
            "Preemptions",
            Unit.PER_SECOND,
            (
                Query(
                    f"sum by (stage) (rate({metric(Measure.PREEMPTED, _OF)}{_RATE}))",
                    "{{stage}}",
                ),
            ),
            "A preempted request's work is discarded and done again.",
            width=6,
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        lines(
            "Tokens in",
            Unit.TOKENS_PER_SECOND,
            (
                Query(
                    f"sum by (stage) (rate({metric(Measure.PROMPT_TOKENS_TOTAL, _OF)}{_RATE}))",
                    "{{stage}}",
                ),
            ),
            "Prompt tokens are counted when the whole prompt has been computed.",
            width=6,
            stacked=True,
        ),
        lines(
            "Tokens out",
            Unit.TOKENS_PER_SECOND,
            (
                Query(
                    f"sum by (stage) (rate({metric(Measure.GENERATED, _OF)}{_RATE}))",
                    "{{stage}}",
                ),
            ),
            "If a model that completes text generates no tokens while requests run, its engine hangs. "
            "See the watchdog's page.",
            width=6,
            stacked=True,
        ),
        lines(
            "Prefix cache hits",
            Unit.RATIO,
            (
                Query(
                    f"sum by (stage) (rate({metric(Measure.PREFIX_HITS, _OF)}{_RATE}))"
                    f" / (sum by (stage) (rate({metric(Measure.PREFIX_QUERIES, _OF)}{_RATE})) "
                    "> 0)",
                    "{{stage}}",
                ),
            ),
            "If the value is low although prompts begin alike, the gateway spreads a client's requests over "
            "replicas.",
            width=6,
            maximum=1,
            empty=_QUIET,
        ),
        lines(
            "Ended requests, by reason",
            Unit.REQUESTS_PER_SECOND,
            (
                Query(
                    f"sum by (finished_reason) (rate({metric(Measure.FINISHED, _OF)}{_RATE}))",
                    "{{finished_reason}}",
                ),
                Query(
                    'sum(replica:measured_requests_per_second{model="$model",stage=~"$stage"})',
                    "measured rate",
                    limit=True,
                ),
            ),
            "abort: the client closed the connection, often after a long wait. length: the answer reached "
            "its token limit. If the sum comes near the dashed line (the measured rate), add a replica.",
            width=6,
            stacked=True,
            empty=_QUIET,
        ),
    ),
)

ERRORS = Row(
    "What went wrong",
    (
        lines(
            "Answers that are not 2xx",
            Unit.REQUESTS_PER_SECOND,
            (
                Query(
                    f"sum by (stage, status) ({with_status(f'rate({_NOT_2XX}{_RATE})')})",
                    "{{stage}} {{status}}",
                ),
            ),
            "4xx: the client's request was wrong. 5xx: the server failed; read the unit's journal.",
            width=8,
            height=7,
            empty="every answer was 2xx",
        ),
        lines(
            "Server errors, share of all answers",
            Unit.RATIO,
            (
                Query(
                    f"(sum(rate({_ERRORS}{_RATE})) or vector(0))"
                    f" / (sum(rate({_ANSWERS}{_RATE})) > 0)",
                    "errors",
                ),
                Query('max(model:objective_error_ratio{model="$model"})', "promised", limit=True),
            ),
            "Above the dashed line, the objective is not met.",
            width=8,
            height=7,
            empty=_QUIET,
        ),
        lines(
            "Restarts",
            Unit.COUNT,
            (
                Query(
                    f"max by (stage) ({_of_this(_RESTARTS.format('stage'))})",
                    "{{stage}}, by systemd",
                ),
                Query(
                    f"max by (stage) ({_of_this(_RESTARTS.format('watchdog'))})",
                    "{{stage}}, by the watchdog",
                ),
            ),
            "Many restarts in a row are a restart loop. In this case, the journal shows the same last lines before each restart.",
            width=8,
            height=7,
        ),
    ),
)

GATEWAY = Row(
    "At the gateway",
    (
        lines(
            "Answers, by class",
            Unit.REQUESTS_PER_SECOND,
            (
                Query(
                    f'sum by (code) (rate(haproxy_backend_http_responses_total{{proxy="$model"}}{_RATE}))',
                    "{{code}}",
                ),
            ),
            "If no server has sent the 5xx answers, they come from the gateway. The gateway's log shows the reason.",
            width=8,
            height=7,
            stacked=True,
            empty=_NO_GATEWAY,
        ),
        lines(
            "Requests, by server",
            Unit.COUNT,
            (
                Query(
                    'sum by (server) (haproxy_server_current_sessions{proxy="$model"})',
                    "{{server}}",
                ),
                Query(
                    'sum(haproxy_backend_current_queue{proxy="$model"})', "waiting at the gateway"
                ),
            ),
            "If requests wait at the gateway, all servers have reached their limit of requests. Add a replica.",
            width=8,
            height=7,
            empty=_NO_GATEWAY,
        ),
        lines(
            "Servers that get requests",
            Unit.COUNT,
            (
                Query(
                    'min by (instance) (haproxy_backend_active_servers{proxy="$model"})',
                    "{{instance}}",
                ),
            ),
            "If this number is lower than the number of replicas, the other replicas are drained, or the gateway sees them as down.",
            width=8,
            height=7,
            empty=_NO_GATEWAY,
        ),
    ),
)

SHAPE = Row(
    "What clients send",
    (
        heatmap(
            "Time to the first token",
            Unit.SECONDS,
            f"sum by (le) (increase({metric(Measure.TTFT, _OF)}{_RATE}))",
            "Two bands mean that there are two kinds of requests, or that one replica is slow.",
            width=8,
        ),
        heatmap(
            "Lengths of prompts",
            Unit.COUNT,
            f"sum by (le) (increase({metric(Measure.PROMPT_TOKENS, _OF)}{_RATE}))",
            "With longer prompts, the first token takes longer, and fewer requests fit into the KV cache.",
            width=8,
        ),
        heatmap(
            "Generated tokens of a request",
            Unit.COUNT,
            f"sum by (le) (increase({metric(Measure.GENERATED_TOKENS, _OF)}{_RATE}))",
            "If the number grows, whole requests take longer, and the KV cache fills up.",
            width=8,
        ),
    ),
)

REPLICAS = Row(
    "Its replicas",
    (
        Panel(
            Kind.TABLE,
            "Every replica",
            Unit.COUNT,
            (),
            "First check a replica whose values differ from the others'.",
            24,
            6,
            columns=(
                Column("Stage", label="stage"),
                Column("Answers", f"min by (stage) (up{{{JOBS},{_OF}}})", shown=UP),
                Column("Running", f"sum by (stage) ({metric(Measure.RUNNING, _OF)})"),
                Column("Waiting", f"sum by (stage) ({metric(Measure.WAITING, _OF)})"),
                Column(
                    "KV cache",
                    f"max by (stage) ({metric(Measure.KV_USE, _OF)})",
                    unit=Unit.RATIO,
                    steps=KV_STEPS,
                ),
                Column(
                    "First token, p99", _quantile(0.99, Measure.TTFT, "stage"), unit=Unit.SECONDS
                ),
                Column(
                    "Between tokens, p99", _quantile(0.99, Measure.ITL, "stage"), unit=Unit.SECONDS
                ),
                Column(
                    "Whole request, p99", _quantile(0.99, Measure.E2E, "stage"), unit=Unit.SECONDS
                ),
                Column(
                    "Tokens out",
                    f"sum by (stage) (rate({metric(Measure.GENERATED, _OF)}{_RATE}))",
                    unit=Unit.TOKENS_PER_SECOND,
                ),
                Column(
                    "Requests",
                    f"sum by (stage) (rate({metric(Measure.FINISHED, _OF)}{_RATE}))",
                    unit=Unit.REQUESTS_PER_SECOND,
                ),
                Column("Stalled", f"max by (stage) ({_of_this(_STALLED)})", shown=YES_IS_BAD),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-model",
    title="gpufleet: model",
    question="Does a model meet its objectives, and if not, why not?",
    variables=(MODEL, STAGE),
    rows=(NOW, FELT, LOAD, THROUGHPUT, ERRORS, GATEWAY, REPLICAS, SHAPE),
)
