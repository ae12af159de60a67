/* From profile values to C results. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

int answer_text(char *out, unsigned size, const char *text)
{
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!text)
        return NVML_NOT_SUPPORTED;
    if (strlen(text) >= size)
        return NVML_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

int answer_unsigned(unsigned *out, unsigned long long value)
{
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = (unsigned)value;
    return NVML_SUCCESS;
}

int answer_number(const struct gpu *gpu, const char *key, unsigned *out)
{
    if (!gpu_has(gpu, key))
        return NVML_NOT_SUPPORTED;
    return answer_unsigned(out, (unsigned long long)gpu_number(gpu, key, 0));
}

/* Step through a list such as "0-31,64-95,7"; false at its end. */
static bool next_range(const char **list, unsigned *first, unsigned *last)
{
    if (!*list || !**list)
        return false;
    char *end;
    *first = *last = (unsigned)strtoul(*list, &end, 0);
    if (end == *list)
        return false;
    if (*end == '-')
        *last = (unsigned)strtoul(end + 1, &end, 0);
    *list = *end == ',' ? end + 1 : end;
    return true;
}

bool list_contains(const char *list, unsigned wanted)
{
    unsigned first, last;
    if (list && strcmp(list, "all") == 0)
        return true;
    while (next_range(&list, &first, &last))
        if (first <= wanted && wanted <= last)
            return true;
    return false;
}

/* Sets one bit for each number of the list; what does not fit is left out, as NVML does. */
void list_to_mask(const char *list, unsigned long words, unsigned long *mask)
{
    const unsigned bits = 8 * sizeof *mask;
    unsigned first, last;
    memset(mask, 0, words * sizeof *mask);
    while (next_range(&list, &first, &last))
        for (unsigned number = first; number <= last && number / bits < words; number++)
            mask[number / bits] |= 1ul << (number % bits);
}
