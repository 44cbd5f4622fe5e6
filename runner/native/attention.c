// Paged attention of queries that are few for their sequence, as in decode steps, straight from the pages of the cache.
//
// The work is cut along the tokens that are read. A span is up to SPAN tokens in blocks that one or more queries read:
// sequences with a common prefix read the same blocks, so that what is made of a span's keys and values serves them
// all, and a single long sequence keeps all threads busy. What a query makes of each span is joined at the end by the
// sums that the softmaxes divide by (the online softmax of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867;
// split along the keys as in Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

#include "functions.h"
#include "kernels.h"
#include <float.h>
#include <math.h>
#include <stddef.h>

// SPAN and MOST_HEAD_SIZE are defined where this is compiled, in build.py: Python has to know them too.

// Rows of queries that are attended together: their sums, two panels wide, fit in the registers.
enum { ROWS = ROWS_BY_2 < 8 ? ROWS_BY_2 : 8 };

static inline lanes larger(lanes a, lanes b)
{
    const int_lanes first = a > b;
    return (lanes)(((int_lanes)a & first) | ((int_lanes)b & ~first));
}

// Makes all lanes of `values` what they come to together. `combined` is what two of them, `a` and `b`, come to. Each
// round combines every lane with the one half the lanes away, and puts the result into two lanes.
#define COMBINED_LANES(values, combined) \
    _Pragma("GCC unroll 4") for (int width = LANES; width > 1; width /= 2) { \
        const lanes a = SHUFFLED(values, values, INTERLEAVED_LOW), b = SHUFFLED(values, values, INTERLEAVED_HIGH); \
        values = combined; \
    }

static inline float largest(lanes values)
{
    COMBINED_LANES(values, larger(a, b))
    return values[0];
}

static inline float sum_of(lanes values)
{
    COMBINED_LANES(values, a + b)
    return values[0];
}

// Turns the scores [SPAN] of tokens `from` to `until` into weights, e^(score - maximum); of the others nothing is kept.
static void softmax(float *scores, long from, long until, float softcap, float *maximum, float *total)
{
    int_lanes index;
    for (int lane = 0; lane < LANES; lane++) index[lane] = lane;
    const long begin = from / LANES * LANES;
    lanes highest = (lanes){0} - INFINITY;
    for (long token = begin; token < until; token += LANES) {
        lanes score = *(lanes *)(scores + token);
        if (softcap) score = softcap * tanh_of(score / softcap);
        if (token < from || token + LANES > until) {
            const int_lanes at = index + (int32_t)token;
            const int_lanes read = (at >= (int32_t)from) & (at < (int32_t)until);
            score = (lanes)(((int_lanes)score & read) | ((int_lanes)((lanes){0} - INFINITY) & ~read));
        }
        highest = larger(score, highest);
        *(lanes *)(scores + token) = score;
    }
    // Where all scores are -inf, their weights are as good as none beside those of any other span.
    *maximum = fmaxf(largest(highest), -FLT_MAX);
    lanes sum = {0};
    for (long token = begin; token < until; token += LANES)
        sum += *(lanes *)(scores + token) = exp_of_negative(*(lanes *)(scores + token) - *maximum);
    *total = sum_of(sum);
}

// Has memory brought near that is read soon.
static inline void fetch(const void *at, long bytes)
{
    for (long offset = 0; offset < bytes; offset += 64) __builtin_prefetch((const char *)at + offset);
}

// Where what a query head makes of a part lies: a row of `parts`, an index into `maxima` and `totals`.
static inline long part_of(const struct layer *layer, long part, long query_head)
{
    return part * layer->heads * layer->group_size + query_head;
}

// Joins what a query's parts hold, each [head_size], into `output`, beside a share of the softmax for a sink.
static void join(
    const struct work *work, const struct layer *layer, long query, long query_head, const float *parts,
    const float *maxima, const float *totals, float *output)
{
    const long size = layer->head_size, begin = work->query_parts[query], end = work->query_parts[query + 1];
    float highest = layer->sinks ? layer->sinks[query_head] : -INFINITY;
    for (long i = begin; i < end; i++) {
        const float maximum = maxima[part_of(layer, work->parts_of_queries[i], query_head)];
        highest = maximum > highest ? maximum : highest;
    }
    float total = layer->sinks ? expf(layer->sinks[query_head] - highest) : 0;
    memset(output, 0, size * sizeof(float));
    for (long first = begin; first < end; first += LANES) {
        const int count = end - first < LANES ? end - first : LANES;
        lanes shares = {0};
        for (int i = 0; i < count; i++)
            shares[i] = maxima[part_of(layer, work->parts_of_queries[first + i], query_head)] - highest;
        shares = exp_of_negative(shares);
        for (int i = 0; i < count; i++) {
            const long at = part_of(layer, work->parts_of_queries[first + i], query_head);
            const float *part = parts + at * size;
            total += shares[i] * totals[at];
            for (long j = 0; j < size; j++) output[j] += shares[i] * part[j];
        }
    }
    for (long j = 0; j < size; j++) output[j] /= total;
}

#define NAME(name) name##_float32
#define element float
#define to_float(value) (value)
#define all_lanes(at) (*(const lanes *)(at))
#define from_float(value) (value)
#include "attention.h"
#undef NAME
#undef element
#undef to_float
#undef all_lanes
#undef from_float

// bfloat16 is the upper half of a float.
static inline float float_of_bfloat16(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static inline lanes lanes_of_bfloat16(const uint16_t *at)
{
    typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return (lanes)(__builtin_convertvector(*(const halves *)at, int_lanes) << 16);
}

// To the nearest, and to the even one of two as near.
static inline uint16_t bfloat16_of_float(float value)
{
    uint32_t bits;
    if (value != value) return 0x7fc0;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define NAME(name) name##_bfloat16
#define element uint16_t
#define to_float float_of_bfloat16
#define all_lanes lanes_of_bfloat16
#define from_float bfloat16_of_float
#include "attention.h"
