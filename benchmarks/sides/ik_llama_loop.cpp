// Greedy batches on ik_llama.cpp behind two C functions, for ik_llama_side.py. Its own batched bench feeds token 0 to
// every sequence, which routes all of them alike in a mixture of experts; here each has its own prompt and its own
// answer.
#include "llama.h"

#include <algorithm>
#include <map>
#include <vector>

namespace {

llama_model * model = nullptr;
int threads = 1;
std::map<int, llama_context *> contexts;  // by number of sequences

void quiet(ggml_log_level, const char *, void *) {}

// One context per batch size, made at the first use, as a server that is set up for that size has it.
llama_context * context_for(int sequences) {
    llama_context *& context = contexts[sequences];
    if (!context) {
        llama_context_params options = llama_context_default_params();
        options.n_ctx = sequences > 1 ? sequences * 256 : 1024;
        options.n_batch = 2048;
        options.n_ubatch = 512;
        options.n_seq_max = sequences;
        options.n_threads = options.n_threads_batch = threads;
        options.flash_attn = true;
        options.fused_moe_up_gate = true;
        options.mla_attn = 3;  // of use to models with latent attention, and read by no other
        context = llama_init_from_model(model, options);
    }
    return context;
}

struct Rows {
    llama_batch batch;
    explicit Rows(int capacity) : batch(llama_batch_init(capacity, 0, 1)) {}
    ~Rows() { llama_batch_free(batch); }
    void add(llama_token token, int position, int sequence, bool logits) {
        const int row = batch.n_tokens++;
        batch.token[row] = token;
        batch.pos[row] = position;
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = sequence;
        batch.logits[row] = logits;
    }
};

llama_token best(llama_context * context, int row) {
    const float * logits = llama_get_logits_ith(context, row);
    return std::max_element(logits, logits + llama_n_vocab(model)) - logits;
}

}  // namespace

extern "C" int loop_open(const char * path, int num_threads) {
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model_params options = llama_model_default_params();
    options.n_gpu_layers = 0;
    options.repack_tensors = true;
    options.use_mmap = false;
    threads = num_threads;
    model = llama_model_load_from_file(path, options);
    return model ? 0 : 1;
}

// tokens [batch, length] row by row; returns the number of tokens emitted, or a negative number.
extern "C" int loop_generate(const int * tokens, int batch, int length, int new_tokens) {
    llama_context * context = context_for(batch);
    if (!context) return -1;
    llama_kv_cache_clear(context);
    Rows prompt(batch * length);
    for (int s = 0; s < batch; s++)
        for (int i = 0; i < length; i++) prompt.add(tokens[s * length + i], i, s, i == length - 1);
    if (llama_decode(context, prompt.batch)) return -2;
    std::vector<llama_token> last(batch);
    for (int s = 0; s < batch; s++) last[s] = best(context, (s + 1) * length - 1);
    for (int step = 0; step + 1 < new_tokens; step++) {
        Rows rows(batch);
        for (int s = 0; s < batch; s++) rows.add(last[s], length + step, s, true);
        if (llama_decode(context, rows.batch)) return -3;
        for (int s = 0; s < batch; s++) last[s] = best(context, s);
    }
    return batch * new_tokens;
}
