-- Shared by all scripts. KEYS[1] is the pool's key prefix, "tandem:{pool}:VERSION:"; the braces keep a pool in one slot.
--
--   nodes             sorted set of worker ids, all with score 0
--   node:ID           hash: info, role, load, incarnation, term, until (ms), draining, credits
--   touched           sorted set: worker id -> when its hash last changed (us): what a gateway's view has not read yet
--   prefix:HASH       who served this prefix last, as coordinator.placement.prefixes has it
--   held:KEY          whose tiers hold the block that ends a prefix
--   req:ID            hash: state, epoch, gateway, and who holds its credits
--   leases            sorted set: request id -> when its lease ends (ms)
--   states, counters  hashes of counts
--   terms             the newest term
--   leader            who reaps
--   damaged           there once a request was found lost: its credits are still taken
--
-- Times are those of Redis' own clock. A term numbers the joins of a pool. Credits are returned to the term they were
-- taken from: a worker that joined anew owes nothing.

local PREFIX = KEYS[1]
local NOW_US = (function()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end)()
local NOW_MS = math.floor(NOW_US / 1000)

-- Of a worker's hash, what placement reckons with.
local ROW = {'term', 'until', 'draining', 'pending', 'beyond_pending', 'reserved', 'beyond_reserved', 'decodes',
  'answers', 'served'}

-- The client parses one long string sooner than many short ones.
local function joined(row)
  return row[1] and table.concat(row, ' ') or ''
end

local function key(kind, id)
  return PREFIX .. kind .. (id or '')
end

-- In the order of their bytes, as the sorted set keeps them; table.sort would follow the locale of the server.
local function worker_ids()
  return redis.call('ZRANGE', key('nodes'), 0, -1)
end

local function touch(worker)
  redis.call('ZADD', key('touched'), NOW_US, worker)
end

local function count(name)
  redis.call('HINCRBY', key('counters'), name, 1)
end

local function read(name)
  local flat, record = redis.call('HGETALL', name), {}
  for i = 1, #flat, 2 do record[flat[i]] = flat[i + 1] end
  return record
end

-- A request that is not there: if it has a lease it should be.
local function note_lost(id)
  if redis.call('ZSCORE', key('leases'), id) then redis.call('SET', key('damaged'), id) end
end

local function credit(worker, term, tokens_field, count_field, tokens, requests)
  local node = key('node:', worker)
  if redis.call('HGET', node, 'term') ~= term then return end
  redis.call('HINCRBY', node, tokens_field, tokens)
  redis.call('HINCRBY', node, count_field, requests)
  touch(worker)
end

-- Where it decodes, if its prompt is computed.
local function count_answer(request, by)
  if request.decode_held ~= '1' or request.prefill_held == '1' then return end
  local node = key('node:', request.decode)
  if redis.call('HGET', node, 'term') == request.decode_term then redis.call('HINCRBY', node, 'answers', by) end
end

local function drop_prefill(id, request)
  if request.prefill_held ~= '1' then return end
  credit(request.prefill, request.prefill_term, 'pending', 'prefills', -request.prefill_tokens, -1)
  redis.call('HSET', key('req:', id), 'prefill_held', '0')
  request.prefill_held = '0'
  count_answer(request, 1)
end

local function drop_decode(id, request)
  if request.decode_held ~= '1' then return end
  count_answer(request, -1)
  credit(request.decode, request.decode_term, 'reserved', 'decodes', -request.decode_tokens, -1)
  redis.call('HSET', key('req:', id), 'decode_held', '0')
  request.decode_held = '0'
end

-- The place that a migration has taken, beside the one where the answer is decoded.
local function drop_destination(id, request)
  if not request.to then return end
  credit(request.to, request.to_term, 'reserved', 'decodes', -request.to_tokens, -1)
  redis.call('HDEL', key('req:', id), 'to', 'to_term', 'to_tokens', 'to_epoch')
  request.to = nil
end

-- The answer goes on where the prompt was computed: so does its credit.
local function decode_at_prefill(id, request)
  if request.decode_held ~= '1' or request.decode == request.prefill then return end
  drop_decode(id, request)
  request.decode, request.decode_term, request.decode_held = request.prefill, request.prefill_term, '1'
  credit(request.decode, request.decode_term, 'reserved', 'decodes', request.decode_tokens, 1)
  redis.call('HSET', key('req:', id), 'decode', request.decode, 'decode_term', request.decode_term, 'decode_held', '1')
end

-- Enter a state: the caller has found it legal. Credits that the state does not hold go back.
local function enter(id, request, to, epoch)
  if request.state then redis.call('HINCRBY', key('states'), request.state, -1) end
  redis.call('HINCRBY', key('states'), to, 1)
  redis.call('HSET', key('req:', id), 'state', to, 'epoch', epoch)
  if to == 'LOCAL_DECODE' then decode_at_prefill(id, request) end
  if not HOLDS_PREFILL[to] then drop_prefill(id, request) end
  if not HOLDS_DECODE[to] then drop_decode(id, request) end
  if ENDS[to] then
    drop_destination(id, request)
    redis.call('ZREM', key('leases'), id)
    redis.call('PEXPIRE', key('req:', id), ENDED_KEPT_MS)
  end
  request.state, request.epoch = to, epoch
end
