/* Events: an Xid is one, to whoever waits for it and has registered before it happened.
 *
 * xid.NUMBER   how often this Xid has happened to the GPU; a higher number than before is news
 *
 * An event set remembers of each GPU what it has been told.  A number that went down, because a
 * fault was cleared, is not an event; the next rise is one again. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "sim.h"

enum {
    XID_CRITICAL = 8,     /* nvmlEventTypeXidCriticalError */
    XIDS = 256,           /* the highest known is below 200 */
    POLL_MILLISECONDS = 50,
    NO_INSTANCE = -1,     /* the whole GPU, not an instance of MIG */
};

struct event_set {
    struct event_set *next;
    unsigned long long types[MAX_GPUS];
    unsigned told[MAX_GPUS][XIDS];
};

/* Sets that were made and not freed: a handle is one of these or no handle. */
static struct event_set *sets;
static pthread_mutex_t waiting = PTHREAD_MUTEX_INITIALIZER;

static struct event_set *set_of_handle(const void *handle)
{
    struct event_set *set = sets;
    while (set && set != handle)
        set = set->next;
    return set;
}

static unsigned times(const struct gpu *gpu, unsigned xid)
{
    char key[32];
    snprintf(key, sizeof key, "xid.%u", xid);
    return (unsigned)gpu_number(gpu, key, 0);
}

/* The first Xid that the set has not been told of; false if there is none. */
static bool next_event(struct event_set *set, struct nvmlEventData *out)
{
    for (unsigned index = 0; index < gpu_count(); index++) {
        if (!(set->types[index] & XID_CRITICAL))
            continue;
        for (unsigned xid = 1; xid < XIDS; xid++) {
            unsigned now = times(gpu_at(index), xid), *told = &set->told[index][xid];
            if (now <= *told) {
                *told = now;
                continue;
            }
            ++*told;
            *out = (struct nvmlEventData){gpu_at(index), XID_CRITICAL, xid, (unsigned)NO_INSTANCE,
                                          (unsigned)NO_INSTANCE};
            return true;
        }
    }
    return false;
}

NVML_API nvmlEventSetCreate(void **out)
{
    ENTER();
    if (!out)
        return NVML_INVALID_ARGUMENT;
    struct event_set *set = calloc(1, sizeof *set);
    if (!set)
        return NVML_UNKNOWN;
    pthread_mutex_lock(&waiting);
    set->next = sets;
    sets = set;
    pthread_mutex_unlock(&waiting);
    *out = set;
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetSupportedEventTypes(const struct gpu *gpu, unsigned long long *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = XID_CRITICAL;
    return NVML_SUCCESS;
}

/* What has happened before is history, not an event. */
NVML_API nvmlDeviceRegisterEvents(const struct gpu *gpu, unsigned long long types, void *handle)
{
    ENTER_GPU(gpu);
    pthread_mutex_lock(&waiting);
    struct event_set *set = set_of_handle(handle);
    if (set) {
        set->types[gpu->index] |= types;
        for (unsigned xid = 0; xid < XIDS; xid++)
            set->told[gpu->index][xid] = times(gpu, xid);
    }
    pthread_mutex_unlock(&waiting);
    return set ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

static int wait_for_event(void *handle, struct nvmlEventData *out, unsigned milliseconds)
{
    for (unsigned waited = 0;; waited += POLL_MILLISECONDS) {
        profile_refresh();
        pthread_mutex_lock(&waiting);
        struct event_set *set = set_of_handle(handle);
        bool found = set && out && next_event(set, out);
        pthread_mutex_unlock(&waiting);
        if (!set)
            return NVML_INVALID_ARGUMENT;
        if (found)
            return NVML_SUCCESS;
        if (waited >= milliseconds)
            return NVML_TIMEOUT;
        struct timespec pause = {0, POLL_MILLISECONDS * 1000000l};
        nanosleep(&pause, NULL);
    }
}

NVML_API nvmlEventSetWait_v2(void *handle, struct nvmlEventData *out, unsigned milliseconds)
{
    ENTER();
    return wait_for_event(handle, out, milliseconds);
}

NVML_API nvmlEventSetFree(void *handle)
{
    ENTER();
    pthread_mutex_lock(&waiting);
    struct event_set **link = &sets;
    while (*link && *link != handle)
        link = &(*link)->next;
    struct event_set *set = *link;
    if (set)
        *link = set->next;
    pthread_mutex_unlock(&waiting);
    free(set);
    return set ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}
