// Paged attention of a few queries, for one element type: included once for each, with these defined:
//
// NAME(name)          the name with the type's suffix
// element             the type of queries, cache and output
// to_float(element)   and from_float(float)
// all_lanes(pointer)  LANES of them as floats

// A vector [token, head] of an attention module's tensor.
static inline const element *NAME(vector)(
    const element *tensor, long token_stride, long head_stride, long token, long head)
{
    return tensor + token * token_stride + head * head_stride;
}

// The first `count` lanes from `at`, at most all of them; 0 in the others.
static inline lanes NAME(load)(const element *at, long count)
{
    if (count == LANES) return all_lanes(at);
    lanes result = {0};
    for (long lane = 0; lane < count; lane++) result[lane] = to_float(at[lane]);
    return result;
}

// Puts the keys and values of tokens into their slots.
void NAME(store)(
    const element *key, long key_token_stride, long key_head_stride, const element *value, long value_token_stride,
    long value_head_stride, element *cache, const int64_t *slots, long tokens, long block_size, long heads,
    long head_size, int threads)
{
    const long page = block_size * heads * head_size;
#pragma omp parallel for num_threads(threads)
    for (long token = 0; token < tokens; token++) {
        if (slots[token] < 0) continue;
        const long block = slots[token] / block_size, offset = slots[token] % block_size;
        element *to = cache + block * 2 * page + offset * heads * head_size;
        for (long head = 0; head < heads; head++, to += head_size) {
            memcpy(to, NAME(vector)(key, key_token_stride, key_head_stride, token, head), head_size * sizeof(element));
            memcpy(
                to + page, NAME(vector)(value, value_token_stride, value_head_stride, token, head),
                head_size * sizeof(element));
        }
    }
}

// One span, one key head: what each of its queries makes of it goes to `parts`.
static void NAME(attend_span)(
    const struct work *work, const struct layer *layer, const element *query, const element *cache, long span,
    long head, float *parts, float *maxima, float *totals)
{
    const long size = layer->head_size, group = layer->group_size, block_size = layer->block_size;
    const long start = work->span_start[span], *blocks = work->blocks + work->span_blocks[span];
    const long first_part = work->span_parts[span], num_parts = work->span_parts[span + 1] - first_part;
    float keys[SPAN * MOST_HEAD_SIZE];    // [SPAN / LANES panels, head_size, LANES tokens]
    float values[SPAN * MOST_HEAD_SIZE];  // [head_size / LANES panels, SPAN tokens, LANES]
    float rows[ROWS * MOST_HEAD_SIZE];
    float weights[ROWS * SPAN];

    // Only what a query reads: everything else may be NaN.
    long begin = SPAN, end = 0;
    for (long part = first_part; part < first_part + num_parts; part++) {
        const long from = work->part_from[part], until = work->part_until[part];
        begin = from < begin ? from : begin;
        end = until > end ? until : end;
    }
    const element *vectors[SPAN] = {NULL};  // their keys; a value lies a page behind its key
    const long page = block_size * layer->heads * size;
    const long *block = blocks + (start + begin) / block_size - start / block_size;
    for (long token = begin, offset = (start + begin) % block_size; token < end; token++) {
        vectors[token] = cache + *block * 2 * page + (offset * layer->heads + head) * size;
        fetch(vectors[token] + page, size * sizeof(element));
        if (++offset == block_size) {
            offset = 0;
            block++;
        }
    }
    for (long token = begin / LANES * LANES; token < end; token += LANES)
        for (long first = 0; first < size; first += LANES) {
            const long count = size - first < LANES ? size - first : LANES;
            lanes part[LANES];
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++)
                part[lane] = vectors[token + lane] ? NAME(load)(vectors[token + lane] + first, count) : (lanes){0};
            transpose(part);
            memcpy(keys + token * size + first * LANES, part, count * sizeof(lanes));
            for (long t = token; t < token + LANES; t++)
                if (vectors[t])
                    *(lanes *)(values + first * SPAN + t * LANES) = NAME(load)(vectors[t] + page + first, count);
        }

    // Rows are the heads of the first query, then those of the second, and so on.
    for (long part = first_part, member = 0; part < first_part + num_parts;) {
        const long from = work->part_from[part], until = work->part_until[part];
        long at[ROWS];  // where what comes of each row goes
        int count = 0;
        while (count < ROWS && part < first_part + num_parts && work->part_from[part] == from &&
               work->part_until[part] == until) {
            const long query_head = head * group + member;
            const element *vector = NAME(vector)(
                query, layer->query_token_stride, layer->query_head_stride, work->part_token[part], query_head);
            for (long i = 0; i < size; i++) rows[count * size + i] = layer->scale * to_float(vector[i]);
            at[count++] = part_of(layer, part, query_head);
            if (++member == group) {
                member = 0;
                part++;
            }
        }
        lanes sums[ROWS * 2];
        for (long token = from / (2 * LANES) * 2 * LANES; token < until; token += 2 * LANES)
            tile_by_2(
                count, rows, size, 1, keys + token * size, LANES * size, size, (lanes *)(weights + token),
                SPAN / LANES);
        for (int i = 0; i < count; i++)
            softmax(weights + i * SPAN, from, until, layer->softcap, maxima + at[i], totals + at[i]);
        for (long first = 0; first < size; first += 2 * LANES) {
            const float *panel = values + first * SPAN + from * LANES;
            tile_by_2(count, weights + from, SPAN, 1, panel, LANES * SPAN, until - from, sums, 2);
            const long width = size - first < 2 * LANES ? size - first : 2 * LANES;
            for (int i = 0; i < count; i++) {
                float *to = parts + at[i] * size + first;
                if (width == 2 * LANES)
                    memcpy(to, sums + 2 * i, 2 * sizeof(lanes));  // of a size the compiler knows: no loop
                else
                    memcpy(to, sums + 2 * i, width * sizeof(float));
            }
        }
    }
}

// query [tokens, heads * group_size, head_size] by its strides, output [tokens, heads * group_size, head_size] without
// gaps: the rows of work's queries are written. Room: parts * heads * group_size vectors in `parts`, as many numbers in
// `maxima` and `totals`.
void NAME(attend)(
    const struct work *work, const struct layer *layer, const element *query, const element *cache, element *output,
    float *parts, float *maxima, float *totals, int threads)
{
    const long query_heads = layer->heads * layer->group_size, size = layer->head_size;
    // The heads of a span lie together: best read by one thread, where there are spans enough for all of them.
    const long together = work->spans < 4 * threads ? 1 : layer->heads;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, together)
        for (long item = 0; item < work->spans * layer->heads; item++)
            NAME(attend_span)(
                work, layer, query, cache, item / layer->heads, item % layer->heads, parts, maxima, totals);
#pragma omp for
        for (long item = 0; item < work->queries * query_heads; item++) {
            float vector[MOST_HEAD_SIZE];
            join(work, layer, item / query_heads, item % query_heads, parts, maxima, totals, vector);
            element *to = output + (work->query_token[item / query_heads] * query_heads + item % query_heads) * size;
            for (long i = 0; i < size; i++) to[i] = from_float(vector[i]);
        }
    }
}
