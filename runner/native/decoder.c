// A decoder layer for a few tokens: attention from pages and a gated MLP, each with a norm before it, maybe one behind
// it, and what goes in added to what comes out.

#include "kernels.h"

// Where in its room a layer keeps what it has computed, in floats, one behind the other.
struct places {
    long between, heads, attended, parts, maxima, totals, room, end;
};

static struct places places_of(const struct decoder *decoder, long rows, long parts)
{
    const struct qkv *qkv = &decoder->qkv;
    const long queries = qkv->heads[QUERIES] * qkv->head_size;
    const long keys_and_values = (qkv->heads[KEYS] + qkv->heads[VALUES]) * qkv->head_size;
    const long widest = queries > qkv->steps ? queries : qkv->steps;
    struct places at = {.between = 0};
    at.heads = at.between + rows * qkv->steps;
    at.attended = at.heads + rows * (queries + keys_and_values);
    at.parts = at.attended + rows * queries;
    at.maxima = at.parts + parts * queries;
    at.totals = at.maxima + parts * qkv->heads[QUERIES];
    at.room = at.totals + parts * qkv->heads[QUERIES];
    // Products lay out what goes into them, the widest of which counts; the MLP what comes out of its gate too.
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

// Puts the keys and values of the rows into the cache, attends to what is there then, and computes y [rows, size] from
// x [rows, size]. Cosines and sines are as in packed_qkv, cache and slots as in store_float32. Each row is a query of
// one of `works`, which have up to `parts` parts. Room for decoder_room floats.
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
    float *heads = room + at.heads, *attended = room + at.attended, *between = room + at.between;
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
