// A decoder layer for a few tokens: attention from pages and a gated MLP, each with a norm before it, maybe one behind
// it, and what goes in added to what comes out.

#include "kernels.h"

struct norm {
    const float *weight;  // [size], or null: nothing is normed
    float epsilon, offset;
};

struct decoder {
    struct norm before_attention, behind_attention, before_mlp, behind_mlp;
    struct qkv qkv;
    const float *output, *output_bias;  // of attention: packed [size, heads * head_size]; [size], or null
    const float *gate, *up, *down;      // packed, [inner, size] and [size, inner]
    long inner;
    int activation;
    float scale, softcap;  // of attention, as in struct layer
};

// Where a layer keeps what it is about to need, one behind the other.
struct places {
    long rows, heads, attended, parts, maxima, totals, room, end;
};

static struct places places_of(const struct decoder *decoder, long rows, long parts)
{
    const struct qkv *qkv = &decoder->qkv;
    const long queries = qkv->heads[QUERIES] * qkv->head_size;
    const long others = (qkv->heads[KEYS] + qkv->heads[VALUES]) * qkv->head_size;
    const long widest = queries > qkv->steps ? queries : qkv->steps;
    struct places at = {.rows = 0};
    at.heads = at.rows + rows * qkv->steps;
    at.attended = at.heads + rows * (queries + others);
    at.parts = at.attended + rows * queries;
    at.maxima = at.parts + parts * queries;
    at.totals = at.maxima + parts * qkv->heads[QUERIES];
    at.room = at.totals + parts * qkv->heads[QUERIES];
    at.end = at.room + rows * (widest + decoder->inner);
    return at;
}

// Floats that decoder_layer needs room for.
long decoder_room(const struct decoder *decoder, long rows, long parts) { return places_of(decoder, rows, parts).end; }

static const float *normed(const struct norm *norm, const float *x, float *y, long rows, long size, int threads)
{
    if (!norm->weight) return x;
    rms_norm(x, norm->weight, y, rows, size, norm->epsilon, norm->offset, threads);
    return y;
}

// x and y [rows, size], cosines and sines as in packed_qkv, cache and slots as in store. Each row is a query of one of
// `works`, which have up to `parts` parts.
void decoder_layer(
    const struct decoder *decoder, const struct work *const *works, long num_works, const float *x,
    const float *cosines, const float *sines, float *cache, const int64_t *slots, float *y, long rows, long parts,
    long block_size, float *room, int threads)
{
    if (!rows) return;
    const struct qkv *qkv = &decoder->qkv;
    const struct places at = places_of(decoder, rows, parts);
    const long size = qkv->steps, head_size = qkv->head_size, num_keys = qkv->heads[KEYS];
    const long num_queries = qkv->heads[QUERIES], row_stride = (num_queries + 2 * num_keys) * head_size;
    float *heads = room + at.heads, *attended = room + at.attended, *between = room + at.rows;
    const struct layer layer = {
        .query_token_stride = row_stride,
        .query_head_stride = head_size,
        .block_size = block_size,
        .heads = num_keys,
        .group_size = num_queries / num_keys,
        .head_size = head_size,
        .scale = decoder->scale,
        .softcap = decoder->softcap,
    };
    const float *keys = heads + num_queries * head_size, *values = keys + num_keys * head_size;

    const float *from = normed(&decoder->before_attention, x, between, rows, size, threads);
    packed_qkv(qkv, from, cosines, sines, heads, rows, room + at.room, threads);
    store_float32(
        keys, row_stride, head_size, values, row_stride, head_size, cache, slots, rows, block_size, num_keys, head_size,
        threads);
    for (long i = 0; i < num_works; i++)
        attend_float32(
            works[i], &layer, heads, cache, attended, room + at.parts, room + at.maxima, room + at.totals, threads);
    packed_product(
        attended, decoder->output, decoder->output_bias, between, rows, size, num_queries * head_size, room + at.room,
        threads);
    from = normed(&decoder->behind_attention, between, between, rows, size, threads);
    for (long i = 0; i < rows * size; i++) y[i] = x[i] + from[i];

    from = normed(&decoder->before_mlp, y, between, rows, size, threads);
    packed_gated_mlp(
        from, decoder->gate, decoder->up, decoder->down, decoder->activation, between, rows, size, decoder->inner, size,
        room + at.room, threads);
    from = normed(&decoder->behind_mlp, between, between, rows, size, threads);
    for (long i = 0; i < rows * size; i++) y[i] += from[i];
}
