/* The profile: flat "key = value" lines from one file and its overlays.
 *
 *   GPUFLEET_NVML_PROFILE=base.conf[:overlay.conf...]   else /etc/gpufleet-lab/nvml.conf
 *   GPUFLEET_NVML_STATE=file                            else <first profile>.state
 *
 * The state file is the last overlay: setters append to it.  Whichever line comes last and fits
 * wins, "gpu.3.key" and "gpu.*.key" alike; an empty value takes a key away.  The files are looked
 * at again on every call, so a fault written while a program runs is seen by it. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#define DEFAULT_PROFILE "/etc/gpufleet-lab/nvml.conf"
#define MAX_FILES 16
#define MAX_KEY 160

struct line {
    char *key;
    char *value;
    unsigned order;        /* place among all lines of all files: the later one wins */
    atomic_uint asked;     /* how often this line was consulted, for "fails every Nth time" */
};

struct table {
    struct line *lines;    /* sorted by key; for equal keys only the last line is kept */
    size_t count;
    size_t room;
};

/* How a file looked when it was read; all zero while it does not exist. */
struct stamp {
    struct timespec modified;
    off_t size;
    ino_t inode;
};

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static char files[MAX_FILES][4096];
static struct stamp stamps[MAX_FILES];
static size_t file_count;

/* Readers take this pointer without a lock.  A table that was replaced is never freed: another
 * thread may still hold strings of it, and a simulator reloads a handful of times in its life. */
static _Atomic(struct table *) current;

/* ---- reading ---- */

static char *trimmed(char *text)
{
    while (*text == ' ' || *text == '\t')
        text++;
    char *end = text + strlen(text);
    while (end > text && strchr(" \t\r\n", end[-1]))
        *--end = '\0';
    return text;
}

static int hexadecimal(char digit)
{
    const char *digits = "0123456789abcdef", *found = strchr(digits, digit | 0x20);
    return digit && found ? (int)(found - digits) : -1;
}

/* "\\xff" becomes that byte: a broken GPU answers with bytes that are no text. */
static char *unescaped(char *text)
{
    char *out = text;
    for (const char *in = text; *in; out++) {
        int high = in[0] == '\\' && in[1] == 'x' ? hexadecimal(in[2]) : -1;
        int low = high >= 0 ? hexadecimal(in[3]) : -1;
        *out = low >= 0 ? (char)(high << 4 | low) : *in;
        in += low >= 0 ? 4 : 1;
    }
    *out = '\0';
    return text;
}

static void table_add(struct table *table, const char *key, const char *value)
{
    if (table->count == table->room) {
        table->room = table->room ? 2 * table->room : 256;
        table->lines = realloc(table->lines, table->room * sizeof *table->lines);
        if (!table->lines)
            abort();
    }
    struct line *line = &table->lines[table->count];
    line->key = strdup(key);
    line->value = strdup(value);
    line->order = (unsigned)table->count++;
    atomic_init(&line->asked, 0);
}

/* Says no more than what is wrong and where: standard error is all that a library has. */
static void read_file(struct table *table, const char *path)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    char buffer[4096];
    for (unsigned number = 1; fgets(buffer, sizeof buffer, file); number++) {
        char *text = trimmed(buffer);
        if (*text == '\0' || *text == '#')
            continue;
        char *equals = strchr(text, '=');
        if (!equals) {
            fprintf(stderr, "%s:%u: expected \"key = value\", found \"%s\"\n", path, number, text);
            continue;
        }
        *equals = '\0';
        table_add(table, trimmed(text), unescaped(trimmed(equals + 1)));
    }
    fclose(file);
}

static int by_key_then_order(const void *left, const void *right)
{
    const struct line *a = left, *b = right;
    int keys = strcmp(a->key, b->key);
    return keys ? keys : (a->order > b->order) - (a->order < b->order);
}

static void keep_last_of_each_key(struct table *table)
{
    size_t kept = 0;
    qsort(table->lines, table->count, sizeof *table->lines, by_key_then_order);
    for (size_t i = 0; i < table->count; i++) {
        bool superseded =
            i + 1 < table->count && strcmp(table->lines[i].key, table->lines[i + 1].key) == 0;
        if (!superseded)
            table->lines[kept++] = table->lines[i];
    }
    table->count = kept;
}

static void load(void)
{
    struct table *table = calloc(1, sizeof *table);
    if (!table)
        abort();
    for (size_t i = 0; i < file_count; i++)
        read_file(table, files[i]);
    if (table->count)
        keep_last_of_each_key(table);
    atomic_store(&current, table);
}

static bool restamp(void)
{
    bool changed = false;
    for (size_t i = 0; i < file_count; i++) {
        struct stat status;
        struct stamp now = {{0, 0}, 0, 0};
        if (stat(files[i], &status) == 0)
            now = (struct stamp){status.st_mtim, status.st_size, status.st_ino};
        if (memcmp(&now, &stamps[i], sizeof now) != 0) {
            stamps[i] = now;
            changed = true;
        }
    }
    return changed;
}

static void add_file(const char *path)
{
    if (file_count < MAX_FILES)
        snprintf(files[file_count++], sizeof files[0], "%s", path);
}

static void name_files(void)
{
    const char *named = getenv("GPUFLEET_NVML_PROFILE");
    char *list = strdup(named && *named ? named : DEFAULT_PROFILE);
    char *rest = NULL;

    file_count = 0;
    for (char *path = strtok_r(list, ":", &rest); path; path = strtok_r(NULL, ":", &rest))
        if (file_count < MAX_FILES - 1) /* one place is the state file's */
            add_file(path);
    free(list);

    const char *state = getenv("GPUFLEET_NVML_STATE");
    if (state && *state) {
        add_file(state);
    } else {
        char beside[4096];
        snprintf(beside, sizeof beside, "%.4080s.state", files[0]);
        add_file(beside);
    }
}

/* A machine without a profile is a machine whose driver is not loaded. */
int profile_open(void)
{
    pthread_mutex_lock(&loading);
    name_files();
    restamp();
    load();
    pthread_mutex_unlock(&loading);

    for (size_t i = 0; i + 1 < file_count; i++) {
        if (access(files[i], R_OK) != 0) {
            fprintf(stderr, "nvml profile %s: %s\n", files[i], strerror(errno));
            return NVML_DRIVER_NOT_LOADED;
        }
    }
    if (!profile_text("count") || !profile_text("system.driver")) {
        fprintf(stderr, "nvml profile %s: it needs \"count\" and \"system.driver\"\n", files[0]);
        return NVML_UNKNOWN;
    }
    return NVML_SUCCESS;
}

void profile_refresh(void)
{
    pthread_mutex_lock(&loading);
    if (file_count && restamp())
        load();
    pthread_mutex_unlock(&loading);
}

/* ---- asking ---- */

static int key_against_line(const void *key, const void *line)
{
    return strcmp(key, ((const struct line *)line)->key);
}

static struct line *find(const char *key)
{
    struct table *table = atomic_load(&current);
    if (!table || !table->count)
        return NULL;
    return bsearch(key, table->lines, table->count, sizeof *table->lines, key_against_line);
}

static struct line *find_for_gpu(const struct gpu *gpu, const char *key)
{
    char name[MAX_KEY];
    snprintf(name, sizeof name, "gpu.%u.%s", gpu->index, key);
    struct line *own = find(name);
    snprintf(name, sizeof name, "gpu.*.%s", key);
    struct line *common = find(name);
    if (own && common)
        return own->order > common->order ? own : common;
    return own ? own : common;
}

static const char *value_of(const struct line *line)
{
    return line && *line->value ? line->value : NULL;
}

const char *profile_text(const char *key)
{
    return value_of(find(key));
}

const char *gpu_text(const struct gpu *gpu, const char *key)
{
    return value_of(find_for_gpu(gpu, key));
}

bool gpu_has(const struct gpu *gpu, const char *key)
{
    return gpu_text(gpu, key) != NULL;
}

/* "FIRST,SECOND,LAST": a value that changes from call to call, and then stays. */
long long gpu_next_number(const struct gpu *gpu, const char *key, long long otherwise)
{
    struct line *line = find_for_gpu(gpu, key);
    const char *text = value_of(line);
    if (!text)
        return otherwise;
    for (unsigned asked = atomic_fetch_add(&line->asked, 1); asked; asked--) {
        const char *comma = strchr(text, ',');
        if (!comma)
            break;
        text = comma + 1;
    }
    return strtoll(text, NULL, 0);
}

/* A number, decimal or 0x hexadecimal. "BASE+RATE" rises: by RATE for each second that the machine
 * has been up, so that every process sees the same counter, and it never falls while it is said. */
static long long number_now(const char *text)
{
    char *rest;
    long long base = strtoll(text, &rest, 0);
    if (*rest != '+')
        return base;
    struct timespec up;
    clock_gettime(CLOCK_BOOTTIME, &up);
    double seconds = (double)up.tv_sec + (double)up.tv_nsec / 1e9;
    return base + (long long)((double)strtoll(rest + 1, NULL, 0) * seconds);
}

long long gpu_number(const struct gpu *gpu, const char *key, long long otherwise)
{
    const char *text = gpu_text(gpu, key);
    return text ? number_now(text) : otherwise;
}

/* ---- faults: KIND.FUNCTION, gpu.N.KIND.FUNCTION, gpu.N.KIND.* ---- */

/* The narrowest line wins: this GPU and function, then the function, then all of this GPU. */
static struct line *fault(const struct gpu *gpu, const char *kind, const char *function)
{
    char key[MAX_KEY];
    struct line *line = NULL;
    snprintf(key, sizeof key, "%s.%s", kind, function);
    if (gpu)
        line = find_for_gpu(gpu, key);
    if (!line)
        line = find(key);
    if (!line && gpu) {
        snprintf(key, sizeof key, "%s.*", kind);
        line = find_for_gpu(gpu, key);
    }
    return line && *line->value ? line : NULL;
}

/* The code of a line that is consulted for the Nth time: "15" fails always, "15/3" every third time,
 * "15@20" from the twentieth on, "0" never (to except one function from a "*"). */
static int code_at(const struct line *line, unsigned asked)
{
    char *rest;
    int code = (int)strtol(line->value, &rest, 0);
    unsigned number = *rest ? (unsigned)strtoul(rest + 1, NULL, 0) : 0;
    if (*rest == '/')
        return number && asked % number == 0 ? code : NVML_SUCCESS;
    return *rest != '@' || asked >= number ? code : NVML_SUCCESS;
}

int fault_code(const struct gpu *gpu, const char *function)
{
    struct line *line = fault(gpu, "error", function);
    return line ? code_at(line, atomic_fetch_add(&line->asked, 1) + 1) : NVML_SUCCESS;
}

/* Every call fails and will fail: a GPU that answers now and then is still there. */
bool fault_is_final(const struct gpu *gpu)
{
    struct line *line = find_for_gpu(gpu, "error.*");
    bool now_and_then = line && strchr(line->value, '/');
    return line && !now_and_then && code_at(line, atomic_load(&line->asked)) != NVML_SUCCESS;
}

double fault_hang(const struct gpu *gpu, const char *function)
{
    struct line *line = fault(gpu, "hang", function);
    return line ? strtod(line->value, NULL) : 0;
}

bool fault_crash(const struct gpu *gpu, const char *function)
{
    struct line *line = fault(gpu, "crash", function);
    return line && strtol(line->value, NULL, 0) != 0;
}

/* ---- remembering ---- */

/* One write of one line, so that two processes that set things at once lose nothing. */
int state_write(const struct gpu *gpu, const char *key, unsigned long long value)
{
    if (geteuid() != 0)
        return NVML_NO_PERMISSION;
    int file = open(files[file_count - 1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0)
        return NVML_NO_PERMISSION;
    char line[MAX_KEY + 64];
    int length = snprintf(line, sizeof line, "gpu.%u.%s = %llu\n", gpu->index, key, value);
    bool written = write(file, line, (size_t)length) == length;
    return close(file) == 0 && written ? NVML_SUCCESS : NVML_UNKNOWN;
}
