// What the kernels are made of: vectors of floats, and the product of a few rows with a few panels of columns.
//
// A panel is LANES columns, step after step: panel[step * LANES + lane]. It is read once, from the first float to the
// last, while the sums of all rows stay in registers.

#ifndef KVCORE_TILE_H
#define KVCORE_TILE_H

#include <stdint.h>
#include <string.h>

// Sums that fit in the registers, beside what is read: rows of a tile one panel wide, and of one two panels wide.
#ifdef __AVX512F__
enum { LANES = 16, ROWS_BY_1 = 16, ROWS_BY_2 = 12 };
#else
enum { LANES = 8, ROWS_BY_1 = 12, ROWS_BY_2 = 4 };
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Floats that are fetched ahead of a panel. Without, a product with few rows waits for memory a quarter of its time.
enum { AHEAD = 64 * LANES };

#ifdef __AVX512F__
#define INTERLEAVED_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVED_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define INTERLEAVED_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVED_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (int_lanes){__VA_ARGS__})
#endif

// Rows become columns. Interleaving each row of the upper half with its like of the lower turns the index of a value,
// row and column written as one number of bits, by one bit; after as many rounds as a row number has bits, row and
// column have changed places.
static inline __attribute__((always_inline)) void transpose(lanes *rows)
{
#pragma GCC unroll 4
    for (int round = LANES; round > 1; round /= 2) {
        lanes mixed[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = SHUFFLED(rows[i], rows[i + LANES / 2], INTERLEAVED_LOW);
            mixed[2 * i + 1] = SHUFFLED(rows[i], rows[i + LANES / 2], INTERLEAVED_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

static inline long rounded_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// sums[row * sums_row + panel] = sum over steps of x[row * x_row + step * x_step] * panel[step]
//
// `rows` and `panels`, 1 or 2, are constants wherever it is called, so that the inner loops are unrolled and the sums
// are registers. Panels come from two places at a time, two of them or the halves of one: memory is asked for further
// ahead than from a single place, and weights arrive about a quarter faster.
static inline __attribute__((always_inline)) void tile(
    const int rows, const int panels, const float *x, long x_row, long x_step, const float *panel, long panel_size,
    long steps, lanes *sums, long sums_row)
{
    lanes sum[ROWS_BY_1 * 2];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels; i++) sum[i] = (lanes){0};
    const int streams = 2 / panels;
    const long length = steps / streams;
    for (long i = 0; i < length; i++)
#pragma GCC unroll 2
        for (int stream = 0; stream < streams; stream++) {
            const long step = stream * length + i;
            lanes column[2];
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) {
                const float *at = panel + p * panel_size + step * LANES;
                __builtin_prefetch(at + AHEAD);
                column[p] = *(const lanes *)at;
            }
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const float factor = x[row * x_row + step * x_step];
#pragma GCC unroll 2
                for (int p = 0; p < panels; p++) sum[row * panels + p] += factor * column[p];
            }
        }
    if (length * streams < steps)  // an odd one is left over
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            sum[row] += x[row * x_row + (steps - 1) * x_step] * *(const lanes *)(panel + (steps - 1) * LANES);
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels; i++) sums[i / panels * sums_row + i % panels] = sum[i];
}

#define TILE_CASE(rows, panels) \
    case rows: tile(rows, panels, x, x_row, x_step, panel, panel_size, steps, sums, sums_row); break;

// For more rows than ROWS_BY_2, up to ROWS_BY_1.
static inline void tile_by_1(
    int rows, const float *x, long x_row, long x_step, const float *panel, long steps, lanes *sums)
{
    const long panel_size = 0, sums_row = 1;
    switch (rows) {
#ifdef __AVX512F__
        TILE_CASE(13, 1) TILE_CASE(14, 1) TILE_CASE(15, 1) TILE_CASE(16, 1)
#else
        TILE_CASE(5, 1) TILE_CASE(6, 1) TILE_CASE(7, 1) TILE_CASE(8, 1)
        TILE_CASE(9, 1) TILE_CASE(10, 1) TILE_CASE(11, 1) TILE_CASE(12, 1)
#endif
    }
}

// For 1 to ROWS_BY_2 rows; the second panel lies panel_size floats behind the first, or before it where that is
// negative.
static inline void tile_by_2(
    int rows, const float *x, long x_row, long x_step, const float *panel, long panel_size, long steps, lanes *sums,
    long sums_row)
{
    switch (rows) {
        TILE_CASE(1, 2) TILE_CASE(2, 2) TILE_CASE(3, 2) TILE_CASE(4, 2)
#ifdef __AVX512F__
        TILE_CASE(5, 2) TILE_CASE(6, 2) TILE_CASE(7, 2) TILE_CASE(8, 2)
        TILE_CASE(9, 2) TILE_CASE(10, 2) TILE_CASE(11, 2) TILE_CASE(12, 2)
#endif
    }
}

#endif
