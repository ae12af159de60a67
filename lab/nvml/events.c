/* Event sets can be made and waited on; no event ever comes. */
#define _POSIX_C_SOURCE 200809L

#include <time.h>

#include "sim.h"

static char event_set; /* its address is the one handle there is */

NVML_API nvmlEventSetCreate(void **out)
{
    ENTER();
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = &event_set;
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetSupportedEventTypes(const struct gpu *gpu, unsigned long long *out)
{
    enum { XID_CRITICAL = 8 };
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = XID_CRITICAL;
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceRegisterEvents(const struct gpu *gpu, unsigned long long types, void *set)
{
    ENTER_GPU(gpu);
    (void)types;
    return set == &event_set ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

NVML_API nvmlEventSetWait_v2(void *set, void *out, unsigned milliseconds)
{
    ENTER();
    (void)out;
    if (set != &event_set)
        return NVML_INVALID_ARGUMENT;
    struct timespec wait = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    nanosleep(&wait, NULL);
    return NVML_TIMEOUT;
}

NVML_API nvmlEventSetFree(void *set)
{
    ENTER();
    return set == &event_set ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}
