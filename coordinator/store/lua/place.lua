-- ARGV: request id, epoch, gateway id, num_tokens, need_tokens, lease_ms, number of excluded, excluded..., hashes...
-- Returns {word, ...}: ok prefill_info decode_info | no_worker side | too_long most | overloaded side wait_s | no_pair | stale
local id, epoch, gateway = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local num_tokens, need_tokens, lease_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local excluded, hashes = {}, {}
local first_hash = 8 + tonumber(ARGV[7])
for i = 8, first_hash - 1 do excluded[ARGV[i]] = true end
for i = first_hash, #ARGV do hashes[#hashes + 1] = ARGV[i] end
local now = now_ms()
local request = read(key('req', id))

-- A chain: who served a block served all before it. So the deepest one known is found by bisection.
local function cached_tokens(worker)
  local prefixes, low, high = key('node', worker, 'prefixes'), 0, #hashes
  if high == 0 or redis.call('EXISTS', prefixes) == 0 then return 0 end
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    local served = redis.call('ZSCORE', prefixes, hashes[middle])
    if served and tonumber(served) > now - AFFINITY_TTL_S * 1000 then low = middle else high = middle - 1 end
  end
  return math.min(low * AFFINITY_BLOCK, num_tokens - 1)
end

local function candidate(worker)
  if excluded[worker] or redis.call('EXISTS', key('node', worker, 'alive')) == 0 then return nil end
  local row = redis.call('HMGET', key('node', worker), 'role', 'layout_id', 'max_model_len', 'capacity', 'pending',
    'beyond_pending', 'reserved', 'beyond_reserved', 'decodes', 'prefill_rate', 'decode_rate', 'transfer_rate',
    'draining', 'info', 'term', 'sends', 'takes', 'step_tokens', 'answers', 'incarnation', 'bad_paths')
  if not row[1] or row[13] == '1' or row[15] == '0' then return nil end
  return {
    worker = worker, role = row[1], layout_id = row[2], capacity = tonumber(row[4]),
    longest = math.min(tonumber(row[3]), tonumber(row[4])) - 1,
    pending = row[5] + row[6], reserved = row[7] + row[8], decodes = tonumber(row[9]),
    prefill_rate = tonumber(row[10]), decode_rate = tonumber(row[11]), transfer_rate = tonumber(row[12]),
    info = row[14], term = row[15], sends = row[16] or '', takes = ' ' .. (row[17] or '') .. ' ',
    step_tokens = tonumber(row[18]), answers = answers_of(row[19], row[9]),
    incarnation = row[20], bad_paths = ' ' .. (row[21] or '') .. ' ',
    cached = cached_tokens(worker),
  }
end

local function filter(list, keep)
  local kept = {}
  for _, item in ipairs(list) do
    if keep(item) then kept[#kept + 1] = item end
  end
  return kept
end

local function any(list, is_so)
  for _, item in ipairs(list) do
    if is_so(item) then return true end
  end
  return false
end

local function best(list, measure, pick)
  local found
  for _, item in ipairs(list) do
    local value = measure(item)
    found = found and pick(found, value) or value
  end
  return found
end

-- placement.py, in the same order of operations

local function or_else(measured, assumed)
  if measured > 0 then return measured end
  return assumed
end

local function assume(candidates)
  local fastest = best(candidates, function(c) return c.prefill_rate end, math.max) or 0
  for _, c in ipairs(candidates) do
    c.prefill_rate = or_else(c.prefill_rate, or_else(fastest, PREFILL_RATE))
    c.decode_rate = or_else(c.decode_rate, DECODE_RATE)
    c.transfer_rate = or_else(c.transfer_rate, TRANSFER_RATE)
  end
  return fastest > 0
end

local function max_pending(p) return p.prefill_rate * MAX_PREFILL_WAIT_S end

local function excess(d) return d.reserved + need_tokens - d.capacity * OVERCOMMIT end

local function prefill_s(p) return (p.pending + (num_tokens - p.cached)) / p.prefill_rate end

local function decode_s(d)
  return math.max(0, d.reserved + need_tokens - d.capacity) / d.decode_rate + ITL_S * (d.decodes + 1)
end

local function stall_weight(c)
  local gap_s = c.step_tokens / c.prefill_rate
  return STALL_WEIGHT * math.min(1.0, gap_s / LONG_GAP_S)
end

local function cost_s(p, d)
  local compute_s = (num_tokens - p.cached) / p.prefill_rate
  local stall_s = stall_weight(p) * compute_s * p.answers
  local cost = prefill_s(p) + decode_s(d) + stall_s
  if p.worker == d.worker then return cost end
  local transfer_s = (num_tokens - d.cached) / p.transfer_rate
  local crowding_s = ITL_S * p.decodes + stall_weight(d) * (d.pending / d.prefill_rate)
  local detour_s = string.find(p.bad_paths, ' ' .. d.incarnation .. ' ', 1, true) and BAD_PATH_S or 0
  return cost + (HANDOFF_S + math.max(0, transfer_s - compute_s)) + crowding_s + detour_s
end

local function meet(p, d)
  if p.worker == d.worker then return true end
  for way in string.gmatch(p.sends, '%S+') do
    if string.find(d.takes, ' ' .. way .. ' ', 1, true) then return true end
  end
  return false
end

local function sorted(list, measure)
  local order = {}
  for i, item in ipairs(list) do order[i] = {cost = measure(item), index = i, item = item} end
  table.sort(order, function(a, b) return a.cost < b.cost or (a.cost == b.cost and a.index < b.index) end)
  for i, row in ipairs(order) do order[i] = row.item end
  return order
end

-- Of pairs that cost the same, one of equal layouts: nothing is converted on the way.
local function cheapest(ready, roomy, top)
  local prefill, decode, least, converts
  for i = 1, math.min(top, #ready) do
    for j = 1, math.min(top, #roomy) do
      local p, d = ready[i], roomy[j]
      local differ, cost = p.layout_id ~= d.layout_id, meet(p, d) and cost_s(p, d)
      if cost and (not least or cost < least or (cost == least and converts and not differ)) then
        prefill, decode, least, converts = p, d, cost, differ
      end
    end
  end
  return prefill, decode
end

local function fitting(list, side)
  if #list == 0 then return nil, {'no_worker', side} end
  local fit = filter(list, function(c) return num_tokens <= c.longest end)
  if #fit == 0 then return nil, {'too_long', best(list, function(c) return c.longest end, math.max)} end
  return fit
end

-- An answer of one token ends where its prompt is computed: its KV would be moved for nothing.
local function as_whole(candidates)
  local whole = filter(candidates, function(c) return c.role ~= 'decode' end)
  for _, c in ipairs(whole) do c.role, c.sends, c.takes = 'mixed', '', '' end
  return whole
end

local function choose(candidates)
  if need_tokens == num_tokens + 1 then candidates = as_whole(candidates) end
  local knows_rate = assume(candidates)
  local prefills, decodes, refusal
  prefills, refusal = fitting(filter(candidates, function(c) return c.role ~= 'decode' end), 'prefill')
  if refusal then return nil, nil, refusal end
  decodes, refusal = fitting(filter(candidates, function(c) return c.role ~= 'prefill' end), 'decode')
  if refusal then return nil, nil, refusal end
  prefills = filter(prefills, function(p) return any(decodes, function(d) return meet(p, d) end) end)
  if #prefills == 0 then return nil, nil, {'no_pair'} end
  local ready = filter(prefills, function(p) return not knows_rate or p.pending <= max_pending(p) end)
  if #ready == 0 then
    local wait_s = best(prefills, function(p) return (p.pending - max_pending(p)) / p.prefill_rate end, math.min)
    return nil, nil, {'overloaded', 'prefill', string.format('%.17g', wait_s)}
  end
  decodes = filter(decodes, function(d) return any(ready, function(p) return meet(p, d) end) end)
  local roomy = filter(decodes, function(d) return excess(d) <= 0 or d.reserved == 0 end)
  if #roomy == 0 then
    local wait_s = best(decodes, function(d) return excess(d) / d.decode_rate end, math.min)
    return nil, nil, {'overloaded', 'decode', string.format('%.17g', wait_s)}
  end
  ready, roomy = sorted(ready, prefill_s), sorted(roomy, decode_s)
  local prefill, decode = cheapest(ready, roomy, TOP)
  if not prefill then prefill, decode = cheapest(ready, roomy, math.max(#ready, #roomy)) end
  return prefill, decode
end

local function remember(worker, capacity)
  if #hashes == 0 then return end
  local prefixes, rows = key('node', worker, 'prefixes'), {}
  for _, hash in ipairs(hashes) do
    rows[#rows + 1] = now
    rows[#rows + 1] = hash
  end
  redis.call('ZADD', prefixes, unpack(rows))
  local most = math.max(AFFINITY_BLOCKS, math.floor(capacity / AFFINITY_BLOCK))
  redis.call('ZREMRANGEBYRANK', prefixes, 0, -most - 1)
  redis.call('PEXPIRE', prefixes, AFFINITY_TTL_S * 1000)
end

local function take(prefill, decode)
  local uncached = num_tokens - prefill.cached
  request.gateway = gateway
  request.prefill, request.prefill_term, request.prefill_tokens = prefill.worker, prefill.term, uncached
  request.decode, request.decode_term, request.decode_tokens = decode.worker, decode.term, need_tokens
  redis.call('HSET', key('req', id), 'gateway', gateway, 'prefill', prefill.worker, 'prefill_term', prefill.term,
    'prefill_tokens', uncached, 'prefill_held', '1', 'decode', decode.worker, 'decode_term', decode.term,
    'decode_tokens', need_tokens, 'decode_held', '1')
  credit(prefill.worker, prefill.term, 'pending', 'prefills', uncached, 1)
  credit(decode.worker, decode.term, 'reserved', 'decodes', need_tokens, 1)
  request.prefill_held, request.decode_held = '1', '1'
  enter(id, request, 'PLACED', epoch)
  redis.call('ZADD', key('leases'), now + lease_ms, id)
  remember(prefill.worker, prefill.capacity)
  if decode.worker ~= prefill.worker then remember(decode.worker, decode.capacity) end
end

local function repeated()
  local infos = {}
  for i, side in ipairs({'prefill', 'decode'}) do
    local row = redis.call('HMGET', key('node', request[side]), 'info', 'term')
    if not row[1] or row[2] ~= request[side .. '_term'] then return {'no_worker', side} end
    infos[i] = row[1]
  end
  return {'ok', infos[1], infos[2]}
end

-- Its gateway knows better, and Redis was away for longer than a lease: it begins anew, and stays counted as it ended.
if request.reaped and request.gateway == gateway and tonumber(request.epoch) < epoch then
  redis.call('DEL', key('req', id))
  request = {}
end
if request.state then
  local at = tonumber(request.epoch)
  if at == epoch and not ENDS[request.state] and request.gateway == gateway then return repeated() end
  if at >= epoch or VERDICT[request.state]['PLACED'] ~= 'legal' then
    count('stale')
    return {'stale'}
  end
  -- The former attempt's credits go back whatever comes of this one; a refusal leaves the rest for its gateway to end.
  drop_prefill(id, request)
  drop_decode(id, request)
end

local candidates = {}
for _, worker in ipairs(worker_ids()) do
  candidates[#candidates + 1] = candidate(worker)
end
local prefill, decode, refusal = choose(candidates)
if refusal then
  count(refusal[1] == 'overloaded' and 'overloaded' or refusal[1] == 'too_long' and 'too_long' or 'unavailable')
  return refusal
end
take(prefill, decode)
count('placed')
return {'ok', prefill.info, decode.info}
