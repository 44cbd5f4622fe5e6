// What Python calls, and the structs that it hands over. Each function says what it does where it is defined; those of
// attention in bfloat16 are like the ones in float32.

#ifndef KVCORE_KERNELS_H
#define KVCORE_KERNELS_H

#include <stdint.h>

// The activations of packed_gated_mlp.
enum { SILU, GELU_TANH };

// A step for one group. A part is a query that reads from a span.
struct work {
    long spans, queries;
    const long *span_start;   // [spans], position of the first token
    const long *span_blocks;  // [spans], where in `blocks` the blocks begin, the one with the first token first
    const long *span_parts;   // [spans + 1], the first of each span's parts
    const long *blocks;       // block ids
    const long *part_token;   // [parts], the query: which of the step's tokens
    const long *part_from;    // [parts], first token of the span that it reads
    const long *part_until;   // [parts], and the one behind the last; more than part_from
    const long *query_token;  // [queries], which of the step's tokens
    const long *query_parts;  // [queries + 1], where in `parts_of_queries` the parts of each begin
    const long *parts_of_queries;
};

// What is the same for all queries of a layer. Strides are in elements.
struct layer {
    long query_token_stride, query_head_stride, block_size, heads, group_size, head_size;
    float scale;
    float softcap;       // 0: none
    const float *sinks;  // [heads * group_size], or null
};

enum { QUERIES, KEYS, VALUES, KINDS };

// What makes queries, keys and values. Norms are of queries and keys, each head by itself.
struct qkv {
    const float *weights[KINDS];  // packed, [heads * head_size, steps]
    const float *biases[KINDS];   // [heads * head_size], or null
    const float *norms[VALUES];   // their weights, [head_size], or null
    float epsilons[VALUES], offsets[VALUES];
    long heads[KINDS];
    long head_size, steps;
};

// A norm in a decoder layer.
struct norm {
    const float *weight;  // [size], or null: nothing is normed
    float epsilon, offset;
};

// A decoder layer.
struct decoder {
    struct norm before_attention, behind_attention, before_mlp, behind_mlp;
    struct qkv qkv;
    const float *output, *output_bias;  // of attention: packed [size, heads * head_size]; [size], or null
    const float *gate, *up, *down;      // packed, [inner, size] and [size, inner]
    long inner;
    int activation;
    float scale, softcap;  // of attention, as in struct layer
};

long packed_size(long columns, long steps);

void pack_weight(const float *weight, long columns, long steps, float *packed, int threads);

void packed_product(
    const float *x, const float *packed, const float *bias, float *y, long rows, long columns, long steps, float *room,
    int threads);

void packed_gated_mlp(
    const float *x, const float *gate, const float *up, const float *down, int activation, float *y, long rows,
    long columns, long inner, long steps, float *room, int threads);

void packed_qkv(
    const struct qkv *layer, const float *x, const float *cosines, const float *sines, float *y, long rows, float *room,
    int threads);

void rms_norm(
    const float *x, const float *weight, float *y, long rows, long size, float epsilon, float offset, int threads);

void store_float32(
    const float *key, long key_token_stride, long key_head_stride, const float *value, long value_token_stride,
    long value_head_stride, float *cache, const int64_t *slots, long tokens, long block_size, long heads,
    long head_size, int threads);

void attend_float32(
    const struct work *work, const struct layer *layer, const float *query, const float *cache, float *output,
    float *parts, float *maxima, float *totals, int threads);

long decoder_room(const struct decoder *decoder, long rows, long parts);

void decoder_layer(
    const struct decoder *decoder, const struct work *const *works, long num_works, const float *x,
    const float *cosines, const float *sines, float *cache, const int64_t *slots, float *y, long rows, long parts,
    long block_size, float *room, int threads);

#endif
