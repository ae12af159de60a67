/* Field values: the many small numbers that NVML serves by id and scope.
 *
 * "field.ID" and "field.ID.SCOPE" in the profile answer for any field and win over what is derived
 * here from the other keys. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

/* Ids by their NVML names; ranges where NVML has one id per link. */
enum field {
    NVLINK_CRC_FLIT_TOTAL = 38,
    NVLINK_CRC_DATA_TOTAL = 45,
    NVLINK_REPLAY_TOTAL = 52,
    NVLINK_RECOVERY_TOTAL = 59,
    PERF_POLICY_FIRST = 74,
    PERF_POLICY_LAST = 81,
    MEMORY_TEMP = 82,
    TOTAL_ENERGY = 83,
    SPEED_LINK_0 = 84,
    SPEED_LINK_5 = 89,
    SPEED_COMMON = 90,
    NVLINK_LINK_COUNT = 91,
    RETIRED_PENDING_SBE = 92,
    RETIRED_PENDING_DBE = 93,
    PCIE_REPLAY = 94,
    SPEED_LINK_6 = 132,
    SPEED_LINK_11 = 137,
    NVLINK_DATA_TX = 138,
    NVLINK_DATA_RX = 139,
    REMAPPED_COR = 142,
    REMAPPED_UNC = 143,
    REMAPPED_PENDING = 144,
    REMAPPED_FAILURE = 145,
    NVSWITCH_CONNECTED_LINKS = 147,
    NVLINK_ECC_TOTAL = 160,
    NVLINK_REPLAY = 161,
    NVLINK_RECOVERY = 162,
    NVLINK_CRC = 163,
    NVLINK_SPEED = 164,
    NVLINK_STATE = 165,
    NVLINK_VERSION = 166,
    C2C_LINK_COUNT = 170,
    C2C_LINK_STATUS = 171,
    C2C_LINK_BANDWIDTH = 172,
    POWER_AVERAGE = 185,
    POWER_INSTANT = 186,
    POWER_MIN_LIMIT = 187,
    POWER_MAX_LIMIT = 188,
    POWER_DEFAULT_LIMIT = 189,
    POWER_CURRENT_LIMIT = 190,
    TLIMIT_SHUTDOWN = 193,
    TLIMIT_SLOWDOWN = 194,
    TLIMIT_MEM_MAX = 195,
    TLIMIT_GPU_MAX = 196,
    NVLINK5_COUNTERS_FIRST = 201,
    NVLINK5_EFFECTIVE_BER = 220,
    NVLINK5_SYMBOL_BER = 222,
    NVLINK5_COUNTERS_LAST = 222,
    GPU_RECOVERY_ACTION = 230,
    THROTTLED_SW_THERMAL = 269,
    THROTTLED_HW_POWER_BRAKE = 271,
};

/* One more than the last id each branch knows: NVML_FI_MAX in the first nvidia-ml-py wheel of the
 * branch (PyPI, 11.450.51 to 13.615.71). */
static const struct {
    unsigned branch;
    unsigned fields;
} known_fields[] = {
    {615, 308}, {610, 303}, {595, 296}, {590, 289}, {575, 274}, {570, 269}, {560, 230},
    {555, 223}, {550, 200}, {535, 197}, {525, 170}, {460, 161}, {0, 146},
};

static bool driver_knows(unsigned field)
{
    unsigned i = 0;
    while (!driver_at_least(known_fields[i].branch, 0))
        i++;
    return field < known_fields[i].fields;
}

/* ---- one value of each type ---- */

static int give_unsigned(struct nvmlFieldValue *out, unsigned long long value)
{
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    out->value.uiVal = (unsigned)value;
    return NVML_SUCCESS;
}

static int give_signed(struct nvmlFieldValue *out, long long value)
{
    out->valueType = NVML_VALUE_TYPE_SIGNED_INT;
    out->value.siVal = (int)value;
    return NVML_SUCCESS;
}

static int give_long(struct nvmlFieldValue *out, unsigned long long value)
{
    out->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    out->value.ullVal = value;
    return NVML_SUCCESS;
}

static int give_key(const struct gpu *gpu, struct nvmlFieldValue *out, const char *key)
{
    if (!gpu_has(gpu, key))
        return NVML_NOT_SUPPORTED;
    return give_unsigned(out, (unsigned long long)gpu_number(gpu, key, 0));
}

static int give_signed_key(const struct gpu *gpu, struct nvmlFieldValue *out, const char *key)
{
    return gpu_has(gpu, key) ? give_signed(out, gpu_number(gpu, key, 0)) : NVML_NOT_SUPPORTED;
}

/* ---- NVLink: the scope is the link ---- */

static int speed(const struct gpu *gpu, struct nvmlFieldValue *out, unsigned link)
{
    bool up = nvlink_state(gpu, link) != 0;
    return give_unsigned(out, up ? (unsigned long long)gpu_number(gpu, "nvlink.mbps", 0) : 0);
}

/* What a link of NVLink 5 counts. Bit error rates are a mantissa (bits 8 to 11) and a negative
 * exponent (bits 0 to 7); that of a link without errors is 15e-255, not zero. */
static int nvlink5_counter(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    enum { NO_ERRORS = 0xfff };
    bool fifth = gpu_number(gpu, "nvlink.version", 0) >= 7;
    if (!fifth || !nvlink_is_up(gpu, out->scopeId))
        return NVML_NOT_SUPPORTED;
    bool rate = out->fieldId == NVLINK5_EFFECTIVE_BER || out->fieldId == NVLINK5_SYMBOL_BER;
    return give_long(out, rate ? NO_ERRORS : 0);
}

static int link_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    unsigned link = out->scopeId;
    if (!nvlink_count(gpu))
        return NVML_NOT_SUPPORTED;
    if (link >= nvlink_count(gpu))
        return NVML_INVALID_ARGUMENT;
    switch (out->fieldId) {
    case NVLINK_SPEED: return speed(gpu, out, link);
    case NVLINK_STATE: return give_unsigned(out, nvlink_state(gpu, link));
    case NVLINK_VERSION: return give_key(gpu, out, "nvlink.version");
    case NVLINK_REPLAY: return give_long(out, nvlink_errors(gpu, "replay", link));
    case NVLINK_RECOVERY: return give_long(out, nvlink_errors(gpu, "recovery", link));
    case NVLINK_CRC: return give_long(out, nvlink_errors(gpu, "crc_data", link));
    default: return nvlink5_counter(gpu, out);
    }
}

static int board_nvlink_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    if (!nvlink_count(gpu))
        return NVML_NOT_SUPPORTED;
    switch (out->fieldId) {
    case NVLINK_LINK_COUNT: return give_unsigned(out, nvlink_count(gpu));
    case NVSWITCH_CONNECTED_LINKS: return give_unsigned(out, nvlink_switch_links(gpu));
    default: return give_key(gpu, out, "nvlink.mbps");
    }
}

/* What all links of a board have counted together. NVLink 5 counts otherwise: 206 and up. */
static int nvlink_total(const struct gpu *gpu, struct nvmlFieldValue *out, const char *kind)
{
    unsigned long long total = 0;
    if (!nvlink_count(gpu) || gpu_number(gpu, "nvlink.version", 0) >= 7)
        return NVML_NOT_SUPPORTED;
    for (unsigned link = 0; link < nvlink_count(gpu); link++)
        total += nvlink_errors(gpu, kind, link);
    return give_long(out, total);
}

/* KiB that all links of a board have sent or received; the scope of all links is the highest
 * number. One link's is not simulated. */
static int nvlink_traffic(const struct gpu *gpu, struct nvmlFieldValue *out, const char *key)
{
    if (!nvlink_count(gpu) || out->scopeId != ~0u)
        return NVML_NOT_SUPPORTED;
    return give_long(out, (unsigned long long)gpu_number(gpu, key, 0));
}

static int speed_of_link(const struct gpu *gpu, struct nvmlFieldValue *out, unsigned link)
{
    return link < nvlink_count(gpu) ? speed(gpu, out, link) : NVML_NOT_SUPPORTED;
}

static int c2c_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    if (!gpu_has(gpu, "c2c.links"))
        return NVML_NOT_SUPPORTED;
    if (out->fieldId != C2C_LINK_COUNT && out->scopeId >= gpu_number(gpu, "c2c.links", 0))
        return NVML_INVALID_ARGUMENT;
    switch (out->fieldId) {
    case C2C_LINK_COUNT: return give_key(gpu, out, "c2c.links");
    case C2C_LINK_STATUS:
        return give_unsigned(out, !list_contains(gpu_text(gpu, "c2c.down"), out->scopeId));
    default: return give_key(gpu, out, "c2c.mbps");
    }
}

/* ---- the rest ---- */

/* Nanoseconds that clocks were held down for a reason, since the driver was loaded. */
static int throttled(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    static const char *const policies[] = {"power",           "thermal",     "sync_boost",
                                           "board_limit",     "low_util",    "reliability",
                                           "total_app_clocks", "total_base_clocks"};
    static const char *const reasons[] = {"sw_thermal", "hw_thermal", "power_brake"};
    char key[48];
    const char *name = out->fieldId <= PERF_POLICY_LAST
                           ? policies[out->fieldId - PERF_POLICY_FIRST]
                           : reasons[out->fieldId - THROTTLED_SW_THERMAL];
    snprintf(key, sizeof key, "violation.%s", name);
    return give_long(out, (unsigned long long)gpu_number(gpu, key, 0));
}

static bool between(unsigned value, unsigned first, unsigned last)
{
    return first <= value && value <= last;
}

/* Every id that is not a single case of its own. */
static int range_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    unsigned id = out->fieldId;
    if (between(id, NVLINK_REPLAY, NVLINK_VERSION) ||
        between(id, NVLINK5_COUNTERS_FIRST, NVLINK5_COUNTERS_LAST))
        return link_field(gpu, out);
    if (between(id, C2C_LINK_COUNT, C2C_LINK_BANDWIDTH))
        return c2c_field(gpu, out);
    if (between(id, SPEED_LINK_0, SPEED_LINK_5))
        return speed_of_link(gpu, out, id - SPEED_LINK_0);
    if (between(id, SPEED_LINK_6, SPEED_LINK_11))
        return speed_of_link(gpu, out, id - SPEED_LINK_6 + 6);
    if (between(id, PERF_POLICY_FIRST, PERF_POLICY_LAST) ||
        between(id, THROTTLED_SW_THERMAL, THROTTLED_HW_POWER_BRAKE))
        return throttled(gpu, out);
    return NVML_NOT_SUPPORTED;
}

/* remap.unc says whether the board remaps at all; the others default to none. */
static int remap_field(const struct gpu *gpu, struct nvmlFieldValue *out, const char *key)
{
    if (!gpu_has(gpu, "remap.unc"))
        return NVML_NOT_SUPPORTED;
    return give_unsigned(out, (unsigned long long)gpu_number(gpu, key, 0));
}

static int energy_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    if (!gpu_has(gpu, "power.energy_mj"))
        return NVML_NOT_SUPPORTED;
    return give_long(out, (unsigned long long)gpu_number(gpu, "power.energy_mj", 0));
}

static int derived_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    switch (out->fieldId) {
    case NVLINK_CRC_FLIT_TOTAL: return nvlink_total(gpu, out, "crc_flit");
    case NVLINK_CRC_DATA_TOTAL: return nvlink_total(gpu, out, "crc_data");
    case NVLINK_REPLAY_TOTAL: return nvlink_total(gpu, out, "replay");
    case NVLINK_RECOVERY_TOTAL: return nvlink_total(gpu, out, "recovery");
    case NVLINK_ECC_TOTAL: return nvlink_total(gpu, out, "ecc");
    case NVLINK_DATA_TX: return nvlink_traffic(gpu, out, "nvlink.tx_kib");
    case NVLINK_DATA_RX: return nvlink_traffic(gpu, out, "nvlink.rx_kib");
    case MEMORY_TEMP: return give_key(gpu, out, "temp.mem");
    case TOTAL_ENERGY: return energy_field(gpu, out);
    case SPEED_COMMON:
    case NVLINK_LINK_COUNT:
    case NVSWITCH_CONNECTED_LINKS: return board_nvlink_field(gpu, out);
    case RETIRED_PENDING_SBE:
    case RETIRED_PENDING_DBE: return give_key(gpu, out, "retired.pending");
    case PCIE_REPLAY: return give_key(gpu, out, "pcie.replay");
    case REMAPPED_COR: return remap_field(gpu, out, "remap.cor");
    case REMAPPED_UNC: return remap_field(gpu, out, "remap.unc");
    case REMAPPED_PENDING: return remap_field(gpu, out, "remap.pending");
    case REMAPPED_FAILURE: return remap_field(gpu, out, "remap.failure");
    case POWER_AVERAGE:
    case POWER_INSTANT: return give_key(gpu, out, "power.draw_mw");
    case POWER_MIN_LIMIT: return give_key(gpu, out, "power.min_mw");
    case POWER_MAX_LIMIT: return give_key(gpu, out, "power.max_mw");
    case POWER_DEFAULT_LIMIT: return give_key(gpu, out, "power.default_mw");
    case POWER_CURRENT_LIMIT: return give_key(gpu, out, "power.limit_mw");
    case TLIMIT_SHUTDOWN: return give_signed_key(gpu, out, "tlimit.shutdown");
    case TLIMIT_SLOWDOWN: return give_signed_key(gpu, out, "tlimit.slowdown");
    case TLIMIT_MEM_MAX: return give_signed_key(gpu, out, "tlimit.mem_max");
    case TLIMIT_GPU_MAX: return give_signed_key(gpu, out, "tlimit.gpu_max");
    case GPU_RECOVERY_ACTION:
        return give_unsigned(out, (unsigned)gpu_number(gpu, "recovery_action", 0));
    default: return range_field(gpu, out);
    }
}

static bool field_in_profile(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    char key[64];
    snprintf(key, sizeof key, "field.%u.%u", out->fieldId, out->scopeId);
    if (!gpu_has(gpu, key))
        snprintf(key, sizeof key, "field.%u", out->fieldId);
    if (!gpu_has(gpu, key))
        return false;
    give_long(out, (unsigned long long)gpu_number(gpu, key, 0));
    return true;
}

/* An invalid argument, or what the profile says: not seen on an old driver. */
static int unknown_field(void)
{
    const char *code = profile_text("system.unknown_field");
    return code ? (int)strtol(code, NULL, 0) : NVML_INVALID_ARGUMENT;
}

static int one_field(const struct gpu *gpu, struct nvmlFieldValue *out)
{
    /* NVML leaves what it does not set undefined: whoever reads it anyway shall notice. */
    memset(&out->value, 0xa5, sizeof out->value);
    if (!driver_knows(out->fieldId))
        return unknown_field();
    return field_in_profile(gpu, out) ? NVML_SUCCESS : derived_field(gpu, out);
}

/* The call succeeds when it could be asked; each value carries its own result. */
NVML_API nvmlDeviceGetFieldValues(const struct gpu *gpu, int count, struct nvmlFieldValue *values)
{
    struct timespec now;
    ENTER_GPU(gpu);
    if (count < 1 || !values)
        return NVML_INVALID_ARGUMENT;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latencyUsec = 1;
        values[i].nvmlReturn = (unsigned)one_field(gpu, &values[i]);
    }
    return NVML_SUCCESS;
}
