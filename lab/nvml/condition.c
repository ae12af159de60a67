/* How a GPU is doing now: power, temperatures, clocks, utilisation, fans. */
#define _POSIX_C_SOURCE 200809L

#include "sim.h"

/* ---- power, in milliwatts ---- */

NUMBER_GETTER(nvmlDeviceGetPowerUsage, "power.draw_mw")
NUMBER_GETTER(nvmlDeviceGetPowerManagementLimit, "power.limit_mw")
NUMBER_GETTER(nvmlDeviceGetPowerManagementDefaultLimit, "power.default_mw")
NUMBER_GETTER(nvmlDeviceGetPowerState, "pstate")
NUMBER_GETTER(nvmlDeviceGetPerformanceState, "pstate")

/* The lowest of all limits in force: a chassis or a rack may cap below what was set. */
NVML_API nvmlDeviceGetEnforcedPowerLimit(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    const char *key = gpu_has(gpu, "power.enforced_mw") ? "power.enforced_mw" : "power.limit_mw";
    return answer_number(gpu, key, out);
}

NVML_API nvmlDeviceGetPowerManagementLimitConstraints(const struct gpu *gpu, unsigned *lowest,
                                                      unsigned *highest)
{
    ENTER_GPU(gpu);
    int answered = answer_number(gpu, "power.min_mw", lowest);
    return answered == NVML_SUCCESS ? answer_number(gpu, "power.max_mw", highest) : answered;
}

NVML_API nvmlDeviceGetPowerManagementMode(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return gpu_has(gpu, "power.limit_mw") ? answer_unsigned(out, 1) : NVML_NOT_SUPPORTED;
}

NVML_API nvmlDeviceSetPowerManagementLimit(const struct gpu *gpu, unsigned milliwatts)
{
    ENTER_GPU(gpu);
    if (!gpu_has(gpu, "power.limit_mw"))
        return NVML_NOT_SUPPORTED;
    bool within = milliwatts >= gpu_number(gpu, "power.min_mw", 0) &&
                  milliwatts <= gpu_number(gpu, "power.max_mw", 0);
    return within ? state_write(gpu, "power.limit_mw", milliwatts) : NVML_INVALID_ARGUMENT;
}

/* Millijoules since the driver was loaded. */
NVML_API nvmlDeviceGetTotalEnergyConsumption(const struct gpu *gpu, unsigned long long *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "power.energy_mj"))
        return NVML_NOT_SUPPORTED;
    *out = (unsigned long long)gpu_number(gpu, "power.energy_mj", 0);
    return NVML_SUCCESS;
}

/* ---- temperatures, in degrees Celsius ---- */

/* Sensor 0 is the GPU die, the only one that NVML defines for these two. */
NVML_API nvmlDeviceGetTemperature(const struct gpu *gpu, unsigned sensor, unsigned *out)
{
    ENTER_GPU(gpu);
    return sensor == 0 ? answer_number(gpu, "temp.gpu", out) : NVML_INVALID_ARGUMENT;
}

NVML_API nvmlDeviceGetTemperatureV(const struct gpu *gpu, struct nvmlTemperature_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlTemperature_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (out->sensorType != 0)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "temp.gpu"))
        return NVML_NOT_SUPPORTED;
    out->temperature = (int)gpu_number(gpu, "temp.gpu", 0);
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetTemperatureThreshold(const struct gpu *gpu, unsigned threshold, unsigned *out)
{
    static const char *const keys[] = {"temp.shutdown", "temp.slowdown", "temp.mem_max",
                                       "temp.gpu_max"};
    ENTER_GPU(gpu);
    if (threshold >= sizeof keys / sizeof *keys)
        return NVML_NOT_SUPPORTED;
    return answer_number(gpu, keys[threshold], out);
}

/* How far below slowdown; some H100 answer zero or less while healthy: temp.margin says it. */
NVML_API nvmlDeviceGetMarginTemperature(const struct gpu *gpu, struct nvmlMarginTemperature_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlMarginTemperature_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!gpu_has(gpu, "temp.slowdown"))
        return NVML_NOT_SUPPORTED;
    long long margin = gpu_number(gpu, "temp.slowdown", 0) - gpu_number(gpu, "temp.gpu", 0);
    out->marginTemperature = (int)gpu_number(gpu, "temp.margin", margin);
    return NVML_SUCCESS;
}

NUMBER_GETTER(nvmlDeviceGetFanSpeed, "fan")

NVML_API nvmlDeviceGetNumFans(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, gpu_has(gpu, "fan"));
}

/* ---- clocks, in MHz ---- */

/* A set of bits: 1 idle, 4 software power cap, 8 hardware slowdown, 0x40 hardware thermal, 0x80
 * power brake ... (nvmlClocksEventReasons). */
static int clocks_reasons(const struct gpu *gpu, unsigned long long *out)
{
    if (!gpu_has(gpu, "clocks.reasons"))
        return NVML_NOT_SUPPORTED;
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = (unsigned long long)gpu_next_number(gpu, "clocks.reasons", 0);
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetCurrentClocksEventReasons(const struct gpu *gpu, unsigned long long *out)
{
    ENTER_GPU(gpu);
    return clocks_reasons(gpu, out);
}

/* The name before R535. */
NVML_API nvmlDeviceGetCurrentClocksThrottleReasons(const struct gpu *gpu, unsigned long long *out)
{
    ENTER_GPU(gpu);
    return clocks_reasons(gpu, out);
}

/* Clock domains: 0 graphics, 1 SM, 2 memory, 3 video. */
NVML_API nvmlDeviceGetClockInfo(const struct gpu *gpu, unsigned domain, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_number(gpu, domain == 2 ? "clocks.mem" : "clocks.sm", out);
}

NVML_API nvmlDeviceGetMaxClockInfo(const struct gpu *gpu, unsigned domain, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_number(gpu, domain == 2 ? "clocks.mem_max" : "clocks.sm_max", out);
}

/* Boards for desktops have no application clocks, and no line `clocks.app`. */
static int application_clock(const struct gpu *gpu, const char *key, const char *otherwise,
                             unsigned *out)
{
    if (!gpu_has(gpu, "clocks.app"))
        return NVML_NOT_SUPPORTED;
    return answer_number(gpu, gpu_has(gpu, key) ? key : otherwise, out);
}

NVML_API nvmlDeviceGetApplicationsClock(const struct gpu *gpu, unsigned domain, unsigned *out)
{
    ENTER_GPU(gpu);
    return domain == 2 ? application_clock(gpu, "clocks.app_mem", "clocks.mem_max", out)
                       : application_clock(gpu, "clocks.app_sm", "clocks.sm_max", out);
}

NVML_API nvmlDeviceGetDefaultApplicationsClock(const struct gpu *gpu, unsigned domain, unsigned *out)
{
    ENTER_GPU(gpu);
    const char *key = domain == 2 ? "clocks.mem_max" : "clocks.sm_max";
    return application_clock(gpu, key, key, out);
}

/* ---- utilisation, in percent ---- */

NVML_API nvmlDeviceGetUtilizationRates(const struct gpu *gpu, struct nvmlUtilization *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    out->gpu = (unsigned)gpu_number(gpu, "util.gpu", 0);
    out->memory = (unsigned)gpu_number(gpu, "util.mem", 0);
    return NVML_SUCCESS;
}

static int idle_engine(unsigned *utilization, unsigned *period_us)
{
    int answered = answer_unsigned(utilization, 0);
    return answered == NVML_SUCCESS ? answer_unsigned(period_us, 0) : answered;
}

NVML_API nvmlDeviceGetEncoderUtilization(const struct gpu *gpu, unsigned *out, unsigned *period_us)
{
    ENTER_GPU(gpu);
    return idle_engine(out, period_us);
}

NVML_API nvmlDeviceGetDecoderUtilization(const struct gpu *gpu, unsigned *out, unsigned *period_us)
{
    ENTER_GPU(gpu);
    return idle_engine(out, period_us);
}
